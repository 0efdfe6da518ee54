"""Probes over several real ranks (gloo, on the CPU): what they measure, and how they end."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import psutil
import pytest

from planner.core.errors import UnsupportedError
from planner.core.schema import MeasurementRecord, TrainSetting
from planner.core.units import MIB
from planner.training.parallel import zero
from planner.training.parallel.data_parallel import refuse_unsupported
from search.probe.parent.fork_server import ForkServer
from search.probe.parent.ranks import put_together
from search.probe.parent.runner import ProbeEvent, run_probe
from search.probe.protocol import OutcomeMessage
from tests.search.probes import AMPLE_SECONDS, request_of
from tests.search.processes import nothing_more_remains

# Enough to come to training on a busy machine, and what a hanging rank's test takes.
SHORT_SECONDS = 25.0


def probe(
    fork_server: ForkServer, factory: str = "tiny", *, cap_bytes: int | None = None,
    deadline_seconds: float = AMPLE_SECONDS, on_event: Any = None, **setting: object,
) -> MeasurementRecord:  # fmt: skip
    return run_probe(
        request_of(factory, cap_bytes, **{"world_size": 2, "parallelism": "ddp", **setting}),
        deadline_seconds=deadline_seconds, fork_server=fork_server, on_event=on_event,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_remains(token: str, fork_server: ForkServer) -> Iterator[None]:
    with nothing_more_remains(token):
        yield


def test_two_ranks_are_measured_as_one(fork_server: ForkServer) -> None:
    """Time is the slower rank's, memory the fuller one's; rates are of one device and of all."""
    record = probe(fork_server, "rank_1_holds_more")
    assert record.status == "measured", record.message
    assert [rank.rank for rank in record.ranks] == [0, 1]
    world = record.world
    assert (world.world_size, world.backend, world.nodes) == (2, "gloo", 1)
    assert world.threads >= 1
    slowest = max(rank.step_seconds for rank in record.ranks)
    assert sorted(record.step_seconds)[len(record.step_seconds) // 2] >= slowest * (1 - 1e-6)
    peaks = [rank.peak_allocated_bytes or 0 for rank in record.ranks]
    assert record.peak_allocated_bytes == max(peaks) == peaks[1]
    assert peaks[1] - peaks[0] > 48 * MIB, "rank 1 holds 64 MiB more"
    assert record.world_images_per_second == 2 * record.images_per_second > 0


SPREAD = [
    {"parallelism": "fsdp", "accumulate": 2, "clip_grad": True},
    {"parallelism": "hsdp", "world_size": 4, "fsdp_shard_size": 2},
    {"ddp_bucket_view": True, "ddp_find_unused": True, "accumulate": 2, "gradient_sync": "every"},
]
MORE_SPREAD = [
    {"parallelism": "fsdp", "fsdp_param_dtype": "bf16", "fsdp_reduce_dtype": "fp32", "ema": True},
    {"parallelism": "fsdp", "precision": "pure-bf16", "fsdp_reshard": False},
    {"ddp_compression": "fp16", "ddp_bucket_mb": 1, "ddp_broadcast_buffers": False},
    {
        "ddp_static_graph": True,
        "precision": "fp16",
        "accumulate": 2,
        "gradient_sync": "every",
        "zero_grad_to_none": False,
    },
    {"world_size": 1},
]


@pytest.mark.parametrize(
    "setting", [*SPREAD, *(pytest.param(s, marks=pytest.mark.release) for s in MORE_SPREAD)]
)
def test_every_way_to_spread_is_run(fork_server: ForkServer, setting: dict[str, object]) -> None:
    record = probe(fork_server, **setting)
    assert record.status == "measured", record.message
    assert len(record.ranks) == setting.get("world_size", 2)


def test_a_slow_rank_is_named(fork_server: ForkServer) -> None:
    record = probe(fork_server, "rank_1_is_slow")
    assert record.status == "measured", record.message
    (flag,) = [flag for flag in record.flags if "straggler" in flag]
    assert flag.startswith("rank 1 (cpu)")
    fast, slow = (rank.step_seconds for rank in record.ranks)
    assert abs(slow / fast - 1) < 0.5, "both wait for it: their steps do not show it"


@pytest.mark.parametrize(
    ("factory", "status", "words"),
    [
        ("rank_1_out_of_memory", "out_of_memory", "can't allocate memory"),
        ("rank_1_is_killed", "crashed", "SIGKILL"),
        ("rank_1_exits", "crashed", "exit status 0 and no answer"),
        ("rank_1_raises", "crashed", "the fault of rank 1"),
    ],
)
def test_a_probe_ends_by_the_rank_that_failed(
    fork_server: ForkServer, factory: str, status: str, words: str
) -> None:
    """Never by the others, who lose their connections by it."""
    record = probe(fork_server, factory, cap_bytes=400 * MIB, world_size=3)
    assert record.status == status
    assert record.message.startswith("rank 1 of 3: ")
    assert words in record.message
    assert not record.ranks


@pytest.mark.release
def test_ranks_that_lost_each_other_for_no_known_cause(fork_server: ForkServer) -> None:
    """Nobody says more: the first that said so is believed, after a while."""
    record = probe(fork_server, "rank_1_loses_the_others")
    assert record.status == "crashed"
    assert "Connection closed by peer" in record.message


@pytest.mark.release
def test_a_rank_that_hangs_ends_with_all_at_the_deadline(fork_server: ForkServer) -> None:
    started = time.monotonic()
    record = probe(fork_server, "rank_1_hangs", deadline_seconds=SHORT_SECONDS)
    assert record.status == "timed_out"
    assert record.phase == "forward"
    assert "rank 1 in forward; rank 0 in backward" in record.message
    assert time.monotonic() - started < SHORT_SECONDS + AMPLE_SECONDS


def rank_pids(fork_server: ForkServer) -> list[int]:
    """The workers: what the supervisors, which the server forks, have forked."""
    server = psutil.Process(fork_server.pid)
    return [worker.pid for guard in server.children() for worker in guard.children()]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.release) for n in range(1, 30))]
)
def test_one_of_three_ranks_is_killed(fork_server: ForkServer, seed: int) -> None:
    """At a random moment of a probe that would take much longer; the fixture looks for the rest."""
    draw = random.Random(seed)
    killed: list[int] = []

    def kill(event: ProbeEvent) -> None:
        if event.phase != "import" or killed:
            return
        killed.append(0)
        threading.Timer(draw.uniform(0, 4), strike).start()

    def strike() -> None:
        while len(pids := rank_pids(fork_server)) < 3:
            time.sleep(0.01)
        os.kill(draw.choice(pids), signal.SIGKILL)

    request = request_of("tiny", world_size=3, parallelism=draw.choice(("ddp", "fsdp")))
    long = request.model_copy(update={"min_measure_seconds": 600.0, "max_measure_seconds": 900.0})
    record = run_probe(long, deadline_seconds=200, fork_server=fork_server, on_event=kill)
    assert record.status == "crashed", record
    assert "SIGKILL" in record.message
    assert record.probe_seconds < 200


def test_a_lost_supervisor_ends_all_ranks(fork_server: ForkServer) -> None:
    def kill(event: ProbeEvent) -> None:
        if event.phase == "backward":
            psutil.Process(fork_server.pid).children()[0].kill()

    record = probe(fork_server, "rank_1_hangs", on_event=kill)
    assert record.status == "crashed"
    assert "supervisor" in record.message


def test_interrupt_ends_all_ranks(fork_server: ForkServer) -> None:
    def interrupt(event: ProbeEvent) -> None:
        if event.phase == "backward":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        probe(fork_server, "rank_1_hangs", on_event=interrupt)


PARENT = """
from search.probe.parent.fork_server import ForkServer
from search.probe.parent.runner import run_probe
from tests.search.probes import request_of
with ForkServer() as fork_server:
    run_probe(request_of("rank_1_hangs", world_size=2, parallelism="ddp"), deadline_seconds=300,
              fork_server=fork_server, on_event=lambda event: print(event.phase, flush=True))
"""


@pytest.mark.release
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_parent_that_is_ended_leaves_no_rank(number: signal.Signals) -> None:
    """The fixture looks for what remains."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    for line in parent.stdout:
        if line.strip() == b"backward":
            break
    parent.send_signal(number)
    assert parent.wait(AMPLE_SECONDS) != 0


def test_gradients_in_bf16_over_gloo_are_refused() -> None:
    setting = TrainSetting(parallelism="ddp", world_size=2, ddp_compression="bf16")
    with pytest.raises(UnsupportedError, match="Set ddp_compression=fp16"):
        refuse_unsupported(setting, "cpu")


def test_what_ranks_say_is_put_together() -> None:
    """Steps by the slower rank each, peaks by the fuller, flags with the ranks that have them."""
    slow = OutcomeMessage(
        probe_id="x", status="measured", step_seconds=(1.0, 4.0), peak_reserved_bytes=10,
        device_bytes=12, forward_seconds=0.5, flags=("both", "mine"), free_bytes=7, taken_bytes=1,
    )  # fmt: skip
    fast = slow.model_copy(
        update={"step_seconds": (2.0, 3.0), "peak_reserved_bytes": 20, "device_bytes": 22,
                "forward_seconds": 0.25, "flags": ("both",), "free_bytes": 5}
    )  # fmt: skip
    found = put_together([slow, fast], ["cuda:0", "cuda:1"])
    assert found.step_seconds == (2.0, 4.0)
    assert (found.peak_reserved_bytes, found.device_bytes) == (20, 22)
    assert (found.free_bytes, found.taken_bytes) == (5, 1)
    assert found.flags[:2] == ("both", "rank 0: mine")
    assert found.flags[2].startswith("rank 0 (cuda:0) is a straggler")
    assert "2.00 ×" in found.flags[2]
    assert [rank.device_bytes for rank in found.ranks] == [12, 22]


@pytest.mark.trainers
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize(
    "setting",
    [
        {"parallelism": "zero1", "accumulate": 2, "clip_grad": True},
        {"parallelism": "zero2", "precision": "bf16", "ema": True},
        {"parallelism": "zero3", "precision": "fp16", "accumulate": 2},
    ],
    ids=str,
)
def test_two_ranks_are_measured(fork_server: ForkServer, setting: dict[str, object]) -> None:
    """What DeepSpeed imports (80 MB and more) is not the setting's memory."""
    request = request_of("tiny", world_size=2, **setting)
    record = run_probe(request, deadline_seconds=AMPLE_SECONDS, fork_server=fork_server)
    assert record.status == "measured", record.message
    assert [rank.rank for rank in record.ranks] == [0, 1]
    for rank in record.ranks:
        assert 0 < (rank.peak_allocated_bytes or 0) < 24 * MIB
        assert rank.step_seconds > 0


def test_without_deepspeed_a_way_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="Install deepspeed, or choose"):
        zero.refuse_unsupported(TrainSetting(parallelism="zero2", world_size=2))


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize(
    ("setting", "way_out"),
    [
        ({"precision": "pure-bf16"}, "Set precision=bf16"),
        ({"compile": "default"}, "Set compile=off"),
        ({"zero_grad_to_none": False}, "Set zero_grad_to_none=true"),
    ],
)
def test_what_no_probe_runs_is_said_before(setting: dict[str, object], way_out: str) -> None:
    with pytest.raises(UnsupportedError, match=way_out):
        zero.refuse_unsupported(TrainSetting(parallelism="zero2", world_size=2, **setting))
