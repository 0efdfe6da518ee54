"""What the compiler does beside compiling: its processes, and what it does without saying so."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch
import torch._dynamo.utils
from torch._inductor import async_compile

from search.probe.worker.verdict import CompileWatch, end_workers


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
