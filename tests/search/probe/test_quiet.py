"""Whether the machine was quiet: what others took is counted, and what is ours is not."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from planner.core.schema import TrainSetting
from planner.machine.host import Host
from search.probe import quiet
from search.probe.evidence import is_disturbed
from search.probe.quiet import QuietWatch
from tests.search.tables import make_record

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
