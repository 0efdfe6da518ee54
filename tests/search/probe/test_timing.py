"""When steps are timed, for how long and in which state of the device, by a clock that stands; what
the compiler does beside compiling, and what the readings of a device's clocks sum to."""

import math
import threading
from collections import Counter
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch._inductor import async_compile

from planner.core.schema import FactoryModel, MeasurementRecord, TrainSetting
from planner.core.schema.record import Spread
from planner.core.units import GIB
from search.probe import evidence
from search.probe.evidence import HURRIED, StopRule, is_disturbed, rate_interval
from search.probe.protocol import ProbeRequest, Report
from search.probe.worker import measure, meter
from search.probe.worker.meter import summarize_clocks
from search.probe.worker.verdict import CompileWatch, end_workers

MODEL = FactoryModel(factory="a:b")
LATE = -math.inf


def request(device: str = "cuda:0", compiled: bool = False, **fields: Any) -> ProbeRequest:
    setting = TrainSetting(batch_size=8, accumulate=2, compile="default" if compiled else "off")
    return ProbeRequest.model_validate(
        {"model": MODEL, "setting": setting, "device": device, **fields}
    )


def rule(started: float = math.inf, deadline: float = math.inf, **fields: Any) -> StopRule:
    """Its clock stands: a start in the future is never late."""
    return StopRule(request(**{"device": "cpu", **fields}), started, deadline)


@pytest.mark.parametrize(
    ("fields", "samples", "is_enough"),
    [
        ({}, [0.1] * 5, False),
        ({}, [0.1] * 6, True),  # the median is known
        ({}, [0.1, 0.1, 0.1, 0.2, 0.2, 0.2], False),
        ({"max_steps": 6}, [0.1, 0.1, 0.1, 0.2, 0.2, 0.2], True),
        ({"started": LATE, "min_steps": 3}, [], False),
        ({"started": LATE, "min_steps": 3}, [0.1, 0.2], False),
        ({"started": LATE, "min_steps": 3}, [0.1, 0.2, 0.1], True),
        ({"deadline": LATE}, [], False),
        ({"deadline": LATE}, [0.1], True),
        # 16 images a step: at best 160 images/s of 0.1 s, however the median may lie.
        ({"give_up_images_per_second": 161.0}, [0.1, 0.2], False),
        ({"give_up_images_per_second": 161.0}, [0.1, 0.2, 0.3], True),
        ({"give_up_images_per_second": 159.0}, [0.1, 0.2, 0.3], False),
        # Six equal samples are precise, and on a GPU they are over before its clocks have settled.
        ({}, [0.01] * 6, True),
        ({"device": "cuda:0"}, [0.01] * 99, False),
        ({"device": "cuda:0"}, [0.01] * 101, True),
        ({"device": "cuda:0", "min_measure_seconds": 5}, [0.01] * 201, False),
    ],
)
def test_timing_ends_when_the_median_is_known_or_in_time(
    fields: dict[str, Any], samples: list[float], is_enough: bool
) -> None:
    assert rule(**fields).is_enough(samples) is is_enough


def test_few_samples_are_measured_and_uncertain() -> None:
    late = rule(started=LATE, min_steps=3)
    assert "too few" in late.flags([0.1, 0.2, 0.1])[0]
    assert "±50.0% only" in late.flags([0.1, 0.1, 0.1, 0.1, 0.2, 0.2, 0.1])[0]
    assert "160" in rule(give_up_images_per_second=161.0).flags([0.1, 0.2, 0.3])[0]
    ending = rule(deadline=LATE)
    (flag,) = ending.flags([0.1])
    few = MeasurementRecord.model_construct(flags=(flag,))
    assert is_disturbed(few), "another probe may be faster"
    assert not is_disturbed(few.model_copy(update={"flags": (*ending.flags([0.1] * 3),)}))
    assert rate_interval(16, [0.1]) == (80.0, 320.0)


class Steps:
    """A training of `seconds` a step, and the clock that only its steps move."""

    scaler = None

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now, self.log = seconds, 0.0, list[str]()

    def step(self, on_phase: object) -> None:
        self.now += self.seconds
        self.log.append("step")

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter


class Device(meter.CpuMeter):
    """It is two steps behind, `seconds` waits for its second mark, and the compiler's benchmarks
    have taken memory."""

    in_flight = 2

    def __init__(self, log: list[str], before: int = 0, after: int = 0) -> None:
        self.log, self.bytes = log, (before, after)
        self.marks = self.waited = self.furthest = 0

    def mark(self) -> float:
        self.marks += 1
        self.furthest = max(self.furthest, self.marks - 1 - self.waited)
        return float(self.marks)

    def seconds(self, start: meter.Mark, end: meter.Mark) -> float:
        self.waited = int(end) - 1
        return end - start

    def release_cache(self) -> tuple[int, int] | None:
        self.log.append("release")
        return self.bytes


def test_steps_are_timed_back_to_back_with_two_in_flight(report: Report) -> None:
    asked = request(min_steps=50, max_steps=50)
    run = measure.ProbeRun(asked, math.inf, report)
    steps: Any = Steps(1.0)
    device = Device(steps.log)
    samples = run._time_steps(steps, device, StopRule(asked, math.inf, math.inf))
    assert set(samples) == {1.0}
    assert len(samples) == len(steps.log) == 52, "those on their way when it was enough count too"
    assert device.furthest == 3, "two queued, and the one being issued"


@pytest.mark.parametrize(
    ("fields", "step_seconds", "warm_seconds", "deadline", "steps"),
    [
        ({}, 0.125, 0.0, 1e9, 4),
        ({}, 0.125, 0.25, 1e9, 2),
        ({}, 5.0, 5.0, 1e9, 0),
        ({"device": "cpu"}, 0.1, 0.0, 1e9, 0),
        ({"warmup_seconds": 100.0}, 1.0, 0.0, 4.5, 4),
    ],
)
def test_gpu_is_warmed_by_time(
    fields: dict[str, Any], step_seconds: float, warm_seconds: float, deadline: float, steps: int,
    monkeypatch: pytest.MonkeyPatch, report: Report,
) -> None:  # fmt: skip
    training: Any = Steps(step_seconds)
    monkeypatch.setattr(measure, "time", training)
    run = measure.ProbeRun(request(**fields), deadline, report)
    run._settle_device(training, Device(training.log), warm_seconds)
    assert (training.log, run.flags) == (["step"] * steps, [])


@pytest.mark.parametrize(("deadline", "steps"), [(100.0, 2), (8.0, 2), (6.9, 1), (0.5, 1)])
def test_warm_up_leaves_time_for_a_sample(
    monkeypatch: pytest.MonkeyPatch, report: Report, deadline: float, steps: int
) -> None:
    """After a step of 1 s: one more, one that is timed, and four in reserve."""
    training: Any = Steps(1.0)
    monkeypatch.setattr(measure, "time", training)
    monkeypatch.setattr(evidence, "time", training)
    run = measure.ProbeRun(request("cpu"), deadline, report)
    assert len(run._warm_up(training, meter.CpuMeter())) == steps
    assert [HURRIED in flag for flag in run.flags] == [True] * (steps < 2)


def test_compilers_leftovers_go_before_timing(
    monkeypatch: pytest.MonkeyPatch, report: Report
) -> None:
    said = "12.00 GiB were reserved after compiling, and 9.00 GiB of them given back before timing"
    for before, flags in ((12, [said]), (3, [])):
        training: Any = Steps(5.0)
        monkeypatch.setattr(measure, "time", training)
        monkeypatch.setattr(
            measure.verdict, "end_workers", lambda log=training.log: log.append("end") or []
        )
        run = measure.ProbeRun(request(compiled=True), 1e9, report)
        run._settle_device(training, Device(training.log, before * GIB, 3 * GIB), 0.0)
        assert (training.log, run.flags) == (["end", "release", "step", "step"], flags)


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


def test_spreads_are_over_all_readings_and_plain_figures_of_the_last() -> None:
    one = {
        "sm_mhz": 1500, "sm_max_mhz": 1980, "memory_mhz": 2600, "temperature_c": 70,
        "power_watts": 300.0, "gpu_percent": 90, "memory_percent": 40,
        "throttle_reasons": ("sw_power_cap",),
    }  # fmt: skip
    readings = [
        {**one, "sm_mhz": 1980, "power_watts": 100.0, "gpu_percent": 20, "memory_percent": 5},
        {**one, "throttle_reasons": ("hw_slowdown",)},
        {**one, "sm_mhz": 1400, "gpu_percent": None, "memory_percent": None},
    ]
    found = summarize_clocks(readings)
    assert (found.sm_mhz, found.num_readings) == (1400, 3)
    assert found.sm_mhz_spread == Spread(least=1400, median=1500, most=1980)
    assert found.power_watts_spread == Spread(least=100, median=300, most=300)
    assert found.busy_percent == Spread(least=20, median=55, most=90)
    assert found.memory_busy_percent == Spread(least=5, median=22.5, most=40)
    assert found.throttle_reasons == ("hw_slowdown", "sw_power_cap")
    assert summarize_clocks([]) is None
