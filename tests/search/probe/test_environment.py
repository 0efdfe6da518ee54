"""What a probe's processes start from: as many compile threads as fit, and no idle spinning."""

from __future__ import annotations

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
