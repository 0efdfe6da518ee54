"""The rates of the device at hand as a search gets them: measured apart, once, and kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planner.core.schema import DeviceInfo
from planner.core.units import GIB, MIB
from planner.machine.hardware import find_gpu
from planner.machine.nvml import NvmlProcess
from planner.throughput.prediction import rates_for
from search.probe import device_rates as rates
from search.probe.device import MemoryInUse, describe_device
from tests.search.tables import H100


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_nothing_is_measured_where_the_catalogue_knows_or_time_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rates, "_measure_apart", lambda *_: pytest.fail("it was measured"))
    assert rates.device_rates("cuda:0", H100, None) is None
    assert rates.device_rates("cpu", describe_device("cpu"), 10.0) is None


class Card:
    """A driver's handle with so many processes on it, held back for these reasons."""

    def __init__(self, *reasons: str, holders: int = 1) -> None:
        self.throttle_reasons = reasons
        self.processes = tuple(NvmlProcess(n, None) for n in range(holders))


UNKNOWN = DeviceInfo(kind="cuda", name="Unheard-of GPU", total_bytes=40 * GIB, capability=(8, 0))


@pytest.mark.parametrize(
    ("card", "used", "said"),
    [
        (Card(), 0, ""),
        (Card("sw_power_cap"), 3 * MIB, ""),
        (None, 0, ""),
        (Card(), GIB, "others hold 1.00 GiB"),
        (Card("hw_thermal_slowdown"), 0, "throttled (hw_thermal_slowdown)"),
        (Card(holders=2), 0, "came to compute"),
    ],
)
def test_what_was_disturbed_is_used_but_not_kept(
    monkeypatch: pytest.MonkeyPatch, card: Card | None, used: int, said: str
) -> None:
    measured = rates_for(find_gpu("a100-sxm-40gb"))
    in_use = MemoryInUse(40 * GIB, used, 40 * GIB - used)
    monkeypatch.setattr(rates, "driver_device", lambda where: card)
    monkeypatch.setattr(rates, "memory_in_use", lambda where: in_use)
    monkeypatch.setattr(rates, "_measure_apart", lambda *_: measured)
    heard: list[str] = []
    found = rates.device_rates("cuda:0", UNKNOWN, None, heard.append)
    assert found == replace(measured, name=UNKNOWN.name)
    assert rates.kept_rates(UNKNOWN) == (None if said else found)
    assert rates.kept_rates(UNKNOWN, "1.13") is None, "a recording of another torch"
    assert rates.kept_rates(UNKNOWN.model_copy(update={"total_bytes": 80 * GIB})) is None
    assert said in heard[-1]
