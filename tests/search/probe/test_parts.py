"""The parts of a probe that run no worker: intervals, what its processes start from,
and whether the machine was quiet."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.core.schema import TrainSetting
from planner.core.units import GIB
from planner.machine import torch_build
from planner.machine.host import Host
from search.probe import quiet
from search.probe.device import MemoryInUse
from search.probe.evidence import is_disturbed, median_interval
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

seconds = st.floats(min_value=1e-4, max_value=1e3)


@given(st.lists(seconds, min_size=1, max_size=60))
def test_interval_encloses_the_median(samples: list[float]) -> None:
    interval = median_interval(samples)
    assert min(samples) <= interval.low <= interval.median <= interval.high <= max(samples)
    assert interval.certain == (len(samples) >= 6)  # 2 · (1/2)^6 = 3.1% and 2 · (1/2)^5 = 6.3%


@pytest.mark.parametrize("n", [6, 9, 12, 20, 50, 100])
def test_interval_has_the_ranks_of_the_sign_test(n: int) -> None:
    """The largest k with P(Binomial(n, 1/2) < k) <= 2.5%, computed here with exact integers."""
    below = [sum(math.comb(n, i) for i in range(k)) for k in range(n)]
    rank = max(k for k in range(n) if below[k] * 1000 <= 25 * 2**n)
    interval = median_interval([float(i) for i in range(1, n + 1)])
    assert (interval.low, interval.high) == (rank, n + 1 - rank)


def test_torch_build_is_read_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
    monkeypatch.setattr(torch_build, "find_spec", lambda name: spec)
    for cuda, hip, build in (("'12.8'", None, "12.8"), (None, "'6.4'", "rocm6.4"),
                             (None, None, "cpu")):  # fmt: skip
        text = f"cuda: Optional[str] = {cuda}\nhip: Optional[str] = {hip}\n"
        (tmp_path / "version.py").write_text(text)
        assert torch_build.installed_build.__wrapped__() == build


def test_an_order_to_end_is_heard_by_a_worker_that_is_not_yet_itself() -> None:
    """The supervisor ignores SIGTERM, and so does its child until it says otherwise."""
    code = """
import os, sys, time
from planner.machine import supervisor
become = supervisor._become_worker
supervisor._become_worker = lambda *given: (time.sleep(0.5), become(*given))
lifeline, order = os.pipe()
os.write(order, b"T")
supervisor.supervise([lambda: time.sleep(60)], lifeline, sys.stdout.fileno())
"""
    said = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, timeout=50)
    assert said.stdout.endswith(b"ended 15 0\n"), said


def test_supervisor_imports_little() -> None:
    """It is started for every probe: no more than a bare interpreter and ctypes."""
    code = "import sys; import planner.machine.supervisor; print(len(sys.modules))"
    answer = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, check=True)
    assert int(answer.stdout) < 80


@pytest.mark.parametrize(
    ("free_gib", "quota", "threads"),
    [(200, None, 32), (200, 3.5, 4), (200, 0.5, 1), (8, None, 8), (8, 4.0, 4), (0, None, 1)],
)
def test_compile_workers_have_room(
    monkeypatch: pytest.MonkeyPatch, free_gib: int, quota: float | None, threads: int
) -> None:
    """Half a GiB each, in half of what is free."""
    memory = MemoryInUse(256 * GIB, 256 * GIB - free_gib * GIB, free_gib * GIB)
    monkeypatch.delenv(THREADS, raising=False)
    monkeypatch.setattr(environment, "memory_in_use", lambda device: memory)
    monkeypatch.setattr(environment, "read_host", lambda: Host(64, 64, quota_cpus=quota))
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
