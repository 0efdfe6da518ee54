"""What the compiler does beside compiling: its processes, and what it does without saying so."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch._inductor import async_compile, config
from torch._inductor.async_compile import AsyncCompile

from planner.core.schema import SwinConfig, TrainSetting
from planner.machine import supervisor
from search.probe.parent.fork_server import ForkServer
from search.probe.parent.runner import run_probe
from search.probe.protocol import ProbeRequest
from search.probe.worker.compiler import CompileWatch, end_workers
from tests.search.probes import AMPLE_SECONDS, request_of


@pytest.mark.compiler
def test_real_workers_are_gone_when_steps_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As compiling for CUDA starts them; they know no GPU, so they can be started here."""
    monkeypatch.setattr(config, "compile_threads", 2)
    monkeypatch.setattr(async_compile, "_pool_set", type(async_compile._pool_set)())
    AsyncCompile.process_pool.cache_clear()
    pool = AsyncCompile.process_pool()
    pool.submit(time.monotonic).result()  # then the pool has forked its workers
    sidecar = pool.process.pid  # type: ignore[union-attr]
    workers = [sidecar, *supervisor.descendants(sidecar)]
    assert len(workers) == 3
    assert supervisor._strays(sidecar) == [], "the supervisor knows them as the compiler's"
    assert end_workers(AMPLE_SECONDS) == []
    assert all(supervisor._stat(pid)[0] in ("", "Z") for pid in workers)


def test_workers_that_hang_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    pool = type("Pool", (), {"shutdown": lambda self: end.wait()})()
    monkeypatch.setattr(async_compile, "_pool_set", {pool})
    assert end_workers(0.01) == ["compile workers were alive while steps were timed"]
    end.set()


def test_graphs_left_out_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = torch._dynamo.utils.counters
    monkeypatch.setitem(counters, "inductor", Counter())
    watch = CompileWatch()
    assert not any("CUDA graphs" in flag for flag in watch.flags())
    counters["inductor"]["cudagraph_skips"] = 2
    assert "CUDA graphs that the compiler left out: 2" in watch.flags()


@pytest.mark.compiler
def test_inductor_counts_the_graphs_it_leaves_out(fork_server: ForkServer) -> None:
    """On the CPU it leaves out all."""
    record = run_probe(
        request_of("tiny", compile="reduce-overhead"),
        deadline_seconds=AMPLE_SECONDS,
        fork_server=fork_server,
    )
    assert record.status == "measured", record.message
    assert any("CUDA graphs" in flag for flag in record.flags)


SWIN = SwinConfig(
    library="native", image_size=(56, 56), depths=(2,), num_heads=(2,), embed_dim=16, num_classes=10
)


@pytest.mark.compiler
@pytest.mark.parametrize(
    "fields",
    [
        {"compile_scope": "blocks", "compile_fullgraph": True, "checkpointing": "blocks"},
        {"compile_scope": "blocks", "activation_memory_budget": 0.3},
        {"compile_dynamic": True},
        {"compile_fullgraph": True, "activation_memory_budget": 0.3},
    ],
)
def test_each_way_to_compile_is_probed(fork_server: ForkServer, fields: dict[str, Any]) -> None:
    plain = {"batch_size": 4, "precision": "fp32", "compile": "default"}
    setting = TrainSetting(**{**plain, **fields})
    record = run_probe(
        ProbeRequest(model=SWIN, setting=setting, max_steps=8),
        deadline_seconds=AMPLE_SECONDS,
        fork_server=fork_server,
    )
    assert record.status == "measured", record.message
    assert record.compile_seconds is not None
    told = ("fell back to eager", "recompiled", "graph breaks")
    assert not any(flag.startswith(told) or flag.endswith(told) for flag in record.flags)
