"""What a probe's processes start from: as many compile threads as fit, and no idle spinning. And
whether the machine was quiet: what others took is counted, and what is ours is not."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from planner.core.schema import TrainSetting
from planner.core.units import GIB
from planner.machine.host import Host
from search.probe import quiet
from search.probe.device import MemoryInUse
from search.probe.evidence import is_disturbed
from search.probe.parent import environment
from search.probe.parent.environment import (
    SPIN_ROUNDS,
    SPINS,
    THREADS,
    compile_threads,
    probe_environment,
)
from search.probe.quiet import QuietWatch
from tests.search.tables import make_record


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


TWO = Host(num_cpus=2, usable_cpus=2)


def watched(
    monkeypatch: pytest.MonkeyPatch, all_busy: float, own: float, host: Host = TWO,
    seconds: float = 10.0, wanted: float = math.inf,
) -> list[str]:  # fmt: skip
    """What is said of `seconds` in which so many seconds of processors went by."""
    readings: Iterator[quiet._Reading] = iter(
        [quiet._Reading(100.0, 50.0, 7.0), quiet._Reading(100 + seconds, 50 + all_busy, 7 + own)]
    )
    monkeypatch.setattr(quiet, "_read", lambda: next(readings))
    monkeypatch.setattr(quiet, "read_host", lambda: host)
    monkeypatch.setattr(quiet.os, "getloadavg", lambda: (20.0, 1.0, 1.0))
    return QuietWatch().flags(wanted)


def test_what_others_took_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 seconds of two processors: 2 were ours."""
    flags = watched(monkeypatch, all_busy=20, own=2)
    assert flags == ["other programs kept 1.8 of 2 processors busy meanwhile (load average 20)"]
    record = make_record(TrainSetting())
    assert not is_disturbed(record)
    assert not is_disturbed(record.model_copy(update={"flags": tuple(flags)}))


@pytest.mark.parametrize(
    ("all_busy", "own", "seconds", "host"),
    [
        (20, 19, 10, TWO),  # ours
        (11, 10, 10, TWO),  # a service
        (0, 9, 10, TWO),  # the kernel's counts are hidden
        (0.2, 0, 0.1, TWO),  # too short to tell
        (300, 20, 10, Host(num_cpus=64, usable_cpus=64, quota_cpus=4.0)),  # 36 are free
    ],
)
def test_a_quiet_machine_is_not_blamed(
    monkeypatch: pytest.MonkeyPatch, all_busy: float, own: float, seconds: float, host: Host
) -> None:
    assert watched(monkeypatch, all_busy, own, host, seconds) == []
