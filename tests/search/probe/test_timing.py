"""When steps are timed, for how long and in which state of the device, by a clock that stands."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from planner.core.schema import FactoryModel, MeasurementRecord, TrainSetting
from planner.core.units import GIB
from search.probe import stopping
from search.probe.evidence import HURRIED, is_disturbed, rate_interval
from search.probe.protocol import ProbeRequest, Report
from search.probe.stopping import StopRule
from search.probe.worker import measure, meter

MODEL = FactoryModel(factory="a:b")


def request(device: str = "cuda:0", compiled: bool = False, **fields: Any) -> ProbeRequest:
    setting = TrainSetting(batch_size=8, accumulate=2, compile="default" if compiled else "off")
    return ProbeRequest.model_validate(
        {"model": MODEL, "setting": setting, "device": device, **fields}
    )


def rule(started: float = math.inf, deadline: float = math.inf, **fields: Any) -> StopRule:
    """Its clock stands: a start in the future is never late."""
    return StopRule(request(**fields), started, deadline)


def test_timing_ends_when_the_median_is_known() -> None:
    assert not rule(device="cpu").is_enough([0.1] * 5)
    assert rule(device="cpu").is_enough([0.1] * 6)
    assert not rule(device="cpu").is_enough([0.1, 0.1, 0.1, 0.2, 0.2, 0.2])
    assert rule(device="cpu", max_steps=6).is_enough([0.1, 0.1, 0.1, 0.2, 0.2, 0.2])


def test_timing_ends_in_time() -> None:
    late = rule(device="cpu", started=-math.inf, min_steps=3)
    assert not late.is_enough([])
    assert not late.is_enough([0.1, 0.2])
    assert late.is_enough([0.1, 0.2, 0.1])
    assert rule(device="cpu", deadline=-math.inf).is_enough([0.1, 0.2, 0.1])
    assert "too few" in late.flags([0.1, 0.2, 0.1])[0]
    assert "±50.0% only" in late.flags([0.1, 0.1, 0.1, 0.1, 0.2, 0.2, 0.1])[0]


def test_few_samples_in_time_are_measured_and_uncertain() -> None:
    ending = rule(device="cpu", deadline=-math.inf)
    assert not ending.is_enough([])
    assert ending.is_enough([0.1])
    (flag,) = ending.flags([0.1])
    few = MeasurementRecord.model_construct(flags=(flag,))
    assert is_disturbed(few), "another probe may be faster"
    assert not is_disturbed(few.model_copy(update={"flags": (*ending.flags([0.1] * 3),)}))
    assert rate_interval(16, [0.1]) == (80.0, 320.0)


def test_hopeless_timing_ends_at_the_third_sample() -> None:
    """16 images a step: at best 160 images/s of 0.1 s, however the median may lie."""
    hopeless = rule(device="cpu", give_up_images_per_second=161.0)
    assert not hopeless.is_enough([0.1, 0.2])
    assert hopeless.is_enough([0.1, 0.2, 0.3])
    assert "160" in hopeless.flags([0.1, 0.2, 0.3])[0]
    assert not rule(device="cpu", give_up_images_per_second=159.0).is_enough([0.1, 0.2, 0.3])


def test_gpu_is_timed_for_a_least_duration() -> None:
    """Six equal samples are precise, and on a GPU they are over before its clocks have settled."""
    assert rule(device="cpu").is_enough([0.01] * 6)
    assert not rule().is_enough([0.01] * 6)
    assert not rule().is_enough([0.01] * 99)
    assert rule().is_enough([0.01] * 101)
    assert not rule(min_measure_seconds=5).is_enough([0.01] * 201)


class Clock:
    """A clock for `search.probe.worker.measure` that only steps move."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter


class Steps:
    """A training of `seconds` a step, which writes into `log`."""

    def __init__(self, clock: Clock, seconds: float, log: list[str]) -> None:
        self.clock, self.seconds, self.log = clock, seconds, log
        self.scaler = None

    def step(self, on_phase: object) -> None:
        self.clock.now += self.seconds
        self.log.append("step")


class Cache(meter.CpuMeter):
    """A device with memory that the compiler's benchmarks have taken."""

    def __init__(self, log: list[str], before: int, after: int) -> None:
        self.log, self.bytes = log, (before, after)

    def release_cache(self) -> tuple[int, int] | None:
        self.log.append("release")
        return self.bytes


def settle(
    monkeypatch: pytest.MonkeyPatch, request: ProbeRequest, step_seconds: float,
    warm_seconds: float = 0.0, before: int = 12 * GIB, after: int = 3 * GIB, deadline: float = 1e9,
) -> tuple[list[str], list[str]]:  # fmt: skip
    """(what happened, flags) when a device is settled before steps are timed."""
    clock, log = Clock(), list[str]()

    def end_workers() -> list[str]:
        log.append("end workers")
        return []

    monkeypatch.setattr(measure, "time", clock)
    monkeypatch.setattr(measure, "end_workers", end_workers)
    reading, writing = os.pipe()
    run = measure.Run(request, deadline, Report(writing, "p"))
    steps: Any = Steps(clock, step_seconds, log)
    run._settle(steps, Cache(log, before, after), warm_seconds)
    os.close(reading)
    os.close(writing)
    return log, run.flags


def test_gpu_is_warmed_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settle(monkeypatch, request(), 0.125) == (["step"] * 4, [])
    assert settle(monkeypatch, request(), 0.125, warm_seconds=0.25) == (["step"] * 2, [])
    assert settle(monkeypatch, request(), 5.0, warm_seconds=5.0) == ([], [])
    assert settle(monkeypatch, request("cpu"), 0.1) == ([], [])
    log, _ = settle(monkeypatch, request(warmup_seconds=100.0), 1.0, deadline=4.5)
    assert log == ["step"] * 4


@pytest.mark.parametrize(("deadline", "steps"), [(100.0, 2), (8.0, 2), (6.9, 1), (0.5, 1)])
def test_warm_up_leaves_time_for_a_sample(
    monkeypatch: pytest.MonkeyPatch, deadline: float, steps: int
) -> None:
    """After a step of 1 s: one more, one that is timed, and four in reserve."""
    clock, log = Clock(), list[str]()
    monkeypatch.setattr(measure, "time", clock)
    monkeypatch.setattr(stopping, "time", clock)
    with Path(os.devnull).open("wb") as channel:
        run = measure.Run(request("cpu"), deadline, Report(channel.fileno(), "p"))
        training: Any = Steps(clock, 1.0, log)
        assert run._warm_up(training, Cache(log, 0, 0), run.phases) == [1.0] * steps
    assert [HURRIED in flag for flag in run.flags] == [True] * (steps < 2)


def test_compilers_leftovers_go_before_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    log, flags = settle(monkeypatch, request(compiled=True), 5.0, warm_seconds=0.0)
    assert log == ["end workers", "release", "step", "step"]
    assert flags == [
        "12.00 GiB were reserved after compiling, and 9.00 GiB of them given back before timing"
    ]
    _, flags = settle(monkeypatch, request(compiled=True), 5.0, before=3 * GIB, after=3 * GIB)
    assert flags == []
