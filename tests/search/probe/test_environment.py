"""What a probe's processes start from: as many compile threads as fit, and a sound fork."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from planner.core.units import GIB
from planner.machine.host import Host
from search.probe.device import MemoryInUse
from search.probe.parent import environment
from search.probe.parent.environment import (
    SPIN_ROUNDS,
    SPINS,
    THREADS,
    compile_threads,
    probe_environment,
)
from search.probe.parent.fork_server import ForkServer
from search.probe.parent.runner import run_probe
from tests.search.probes import AMPLE_SECONDS, request_of


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 cores and 200 GiB, none of them limited."""
    monkeypatch.delenv(THREADS, raising=False)
    give_memory(monkeypatch, 200)
    give_cores(monkeypatch, None)


def give_memory(monkeypatch: pytest.MonkeyPatch, free_gib: int) -> None:
    memory = MemoryInUse(256 * GIB, 256 * GIB - free_gib * GIB, free_gib * GIB)
    monkeypatch.setattr(environment, "memory_in_use", lambda device: memory)


def give_cores(monkeypatch: pytest.MonkeyPatch, quota: float | None) -> None:
    monkeypatch.setattr(environment, "read_host", lambda: Host(64, 64, quota_cpus=quota))


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("free_gib", "quota", "threads"),
    [(200, None, 32), (200, 3.5, 4), (200, 0.5, 1), (8, None, 8), (8, 4.0, 4), (0, None, 1)],
)
def test_compile_workers_have_room(
    monkeypatch: pytest.MonkeyPatch, free_gib: int, quota: float | None, threads: int
) -> None:
    """Half a GiB each, in half of what is free."""
    give_memory(monkeypatch, free_gib)
    give_cores(monkeypatch, quota)
    assert compile_threads() == threads
    assert probe_environment()[THREADS] == str(threads)
    monkeypatch.setenv(THREADS, "7")
    assert probe_environment()[THREADS] == "7", "a user's number is kept"


def test_threads_do_not_wait_on_processors_that_others_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(SPINS, raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert probe_environment()[SPINS] == str(SPIN_ROUNDS)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert SPINS not in probe_environment(), "a user's word is kept"
    monkeypatch.setenv(SPINS, "7")
    assert probe_environment()[SPINS] == "7"


def test_workers_and_nurseries_are_told(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    given: list[dict[str, str]] = []
    start = subprocess.Popen

    def popen(command: Sequence[str], **options: Any) -> Any:
        if "-c" not in command:  # else it asks what torch there is, once in a process
            given.append(options["env"])
        return start(command, **options)

    monkeypatch.delenv(THREADS, raising=False)
    monkeypatch.setattr(environment, "compile_threads", lambda: 3)
    monkeypatch.setattr(subprocess, "Popen", popen)
    ForkServer().close()
    run_probe(
        request_of("tiny"), deadline_seconds=AMPLE_SECONDS, worker_command=["/no/such/program"]
    )
    assert [found[THREADS] for found in given] == ["3", "3"]


POISONED = """
import os
from search.probe.worker import worker
from search.probe.protocol import AnswerReader, OutcomeMessage, WorkOrder, encode
from tests.search.probes import request_of
import torch
torch.cuda._is_in_bad_fork = lambda: True  # as after cudaGetDeviceCount in a parent
request = request_of("needs_sound_fork")
(order, ours), (theirs, result) = os.pipe(), os.pipe()
if os.fork() == 0:
    os.close(ours)
    os.close(theirs)
    worker.work(order, result)
os.write(ours, encode(WorkOrder(request=request, deadline_seconds=300)).lstrip())
os.close(ours)
os.close(result)
reader, answers = AnswerReader(request.probe_id), []
while data := os.read(theirs, 1 << 16):
    answers += reader.feed(data)
print([a.status for a in answers if isinstance(a, OutcomeMessage)])
"""


@pytest.mark.release
def test_poisoned_fork_becomes_a_fresh_process() -> None:
    """Which would else fail at its first operation on the GPU; a fresh one has no such mark."""
    answer = subprocess.run([sys.executable, "-c", POISONED], capture_output=True, check=True)
    assert answer.stdout.split(b"\n")[-2] == b"['measured']", answer.stderr
