"""Others on the device: a failure says what they held and took; a device is asked before it is
touched. And what several ranks measured, as one."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest

from planner.core.errors import UnsupportedError
from planner.core.schema import DeviceInfo, TrainSetting
from planner.core.units import GIB, MIB
from planner.training import zero
from search.probe.device import MemoryInUse
from search.probe.parent import runner
from search.probe.parent.ranks import put_together
from search.probe.parent.runner import run_probe
from search.probe.protocol import OutcomeMessage, Report
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
        ("NoLogits", "unsupported", "contract", "eturn a task"),
        ("NotANumber", "non_finite", "forward", "nan"),
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
    for factory in ("raises", "Tiny"):
        outcome = measure.measure(request_of(factory), float("inf"), report)
        assert (outcome.status == "measured") == (factory == "Tiny")
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
    request = request_of("Tiny").model_copy(update={"device": "cuda:0"})
    record = runner.run_probe(
        request,
        deadline_seconds=AMPLE_SECONDS,
        worker_command=[sys.executable, "-S", "-c", "import os; os.abort()"],
    )
    assert record.status == "crashed"
    assert (record.free_bytes, record.taken_bytes) == (22 * GIB, taken * GIB)


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


def test_what_no_probe_runs_is_said_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    sharded = TrainSetting(parallelism="zero2", world_size=2)
    monkeypatch.setattr(zero, "find_spec", lambda name: "found")
    for fields, way_out in (
        ({"precision": "pure-bf16"}, "Set precision=bf16"),
        ({"compile": "default"}, "Set compile=off"),
        ({"zero_grad_to_none": False}, "Set zero_grad_to_none=true"),
    ):
        with pytest.raises(UnsupportedError, match=way_out):
            zero.refuse_unsupported(sharded.model_copy(update=fields))
    monkeypatch.setattr(zero, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="Install deepspeed, or choose"):
        zero.refuse_unsupported(sharded)


@pytest.mark.trainers
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_two_ranks_of_deepspeed_are_measured() -> None:
    """What DeepSpeed imports (80 MB and more) is not the setting's memory."""
    setting = {"parallelism": "zero2", "precision": "bf16", "ema": True, "world_size": 2}
    record = run_probe(request_of("Tiny", **setting), deadline_seconds=AMPLE_SECONDS)
    assert record.status == "measured", record.message
    assert [rank.rank for rank in record.ranks] == [0, 1]
    for rank in record.ranks:
        assert 0 < (rank.peak_allocated_bytes or 0) < 24 * MIB
        assert rank.step_seconds > 0
