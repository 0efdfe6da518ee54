"""Others on the device: a failure says what they held and took; a device is asked before it is
touched."""

from __future__ import annotations

import sys

import pytest

from planner.core.schema import DeviceInfo
from planner.core.units import GIB
from search.probe.device import MemoryInUse
from search.probe.parent import runner
from search.probe.protocol import Report
from search.probe.worker import measure, meter
from search.probe.worker.meter import Crowding
from tests.search.probes import AMPLE_SECONDS, request_of

CARD = DeviceInfo(kind="cuda", name="Card", total_bytes=24 * GIB, capability=(8, 6))


def test_a_model_that_fails_says_how_and_where(report: Report) -> None:
    for factory, status, phase, words in (
        ("raises", "unsupported", "build", "the checkpoint is not there"),
        ("no_module", "unsupported", "build", "torch.nn.Module"),
        ("exits", "unsupported", "build", "SystemExit"),
        ("no_such_factory", "unsupported", "build", "no_such_factory"),
        ("no_logits", "unsupported", "contract", "eturn a task"),
        ("nan_at_once", "non_finite", "forward", "nan"),
    ):
        outcome = measure.measure(request_of(factory), float("inf"), report)
        assert (outcome.status, outcome.phase) == (status, phase), factory
        assert words in outcome.message


class CrowdedMeter(meter.CpuMeter):
    def crowding(self) -> Crowding:
        return Crowding(9 * GIB, 5 * GIB)

    def flags(self) -> list[str]:
        return ["other processes took 5.00 GiB of the GPU meanwhile"]


def test_a_failure_says_who_disturbed_it(monkeypatch: pytest.MonkeyPatch, report: Report) -> None:
    monkeypatch.setattr(measure, "make_meter", lambda device: CrowdedMeter())
    for factory in ("raises", "tiny"):
        outcome = measure.measure(request_of(factory), float("inf"), report)
        assert (outcome.status == "measured") == (factory == "tiny")
        assert "other processes took 5.00 GiB of the GPU meanwhile" in outcome.flags
        assert (outcome.free_bytes, outcome.taken_bytes) == (9 * GIB, 5 * GIB)


class SleepingClock:
    """A clock that only sleeping moves."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("used", "taken"),
    [
        ([2, 15], 13),  # a neighbour came, and stays
        ([2, 15, 9, 2], 0),  # what fell was the worker's own, given back after its end
        ([2, 15, 1], 0),  # a neighbour left meanwhile
    ],
)
def test_for_a_worker_that_cannot_say_it_the_driver_is_asked(
    monkeypatch: pytest.MonkeyPatch, used: list[int], taken: int
) -> None:
    monkeypatch.setattr(runner, "time", SleepingClock())
    monkeypatch.setattr(runner, "describe_device", lambda device: CARD)
    left = [n * GIB for n in used]

    def in_use(device: str) -> MemoryInUse:
        now = left.pop(0) if len(left) > 1 else left[0]
        return MemoryInUse(24 * GIB, now, 24 * GIB - now)

    monkeypatch.setattr(runner, "memory_in_use", in_use)
    request = request_of("tiny").model_copy(update={"device": "cuda:0"})
    record = runner.run_probe(
        request,
        deadline_seconds=AMPLE_SECONDS,
        worker_command=[sys.executable, "-S", "-c", "import os; os.abort()"],
    )
    assert record.status == "crashed"
    assert (record.free_bytes, record.taken_bytes) == (22 * GIB, taken * GIB)
