"""The process that times: `python -m planner.benches.worker RESULT_FD ORDER`. Needs torch.

Ends after the first case that fails: the next ones get a fresh process.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import torch

from planner.benches.attention import TOLERANCES, Subject
from planner.benches.order import Answer, Order, Teller
from planner.environment.bench import clock_of
from planner.errors import PlannerError, UnsupportedError
from planner.schema.bench import BenchCase, BenchOutcome, BenchStatus, Timing
from search.probe.failure import is_allocation_failure, shorten
from search.probe.interval import median_interval
from search.probe.protocol import ProbeRequest
from search.probe.stopping import StopRule
from search.probe.worker.meter import CpuMeter, CudaMeter, Mark, Meter
from search.probe.worker.precision import check_matrix_units, set_precision
from search.probe.worker.worker import end, prepare

# Six samples are the fewest that enclose a median with 95% (search/probe/interval.py).
_LEAST_SAMPLES, _MOST_SAMPLES = 6, 1000


class Sample(NamedTuple):
    """Seconds of one forward and the backward after it."""

    forward: float
    backward: float


class Marks(NamedTuple):
    start: Mark
    middle: Mark
    end: Mark


def main() -> NoReturn:
    result_fd = int(sys.argv[1])
    prepare(result_fd)
    carry_out(Order.model_validate_json(sys.argv[2]), Teller(result_fd))
    end()


def carry_out(order: Order, teller: Teller) -> None:
    meter = CudaMeter(order.device) if order.device != "cpu" else CpuMeter(clock_of("cpu"))
    for number, case in enumerate(order.cases):

        def enter(phase: str, number: int = number) -> None:
            teller.say(Answer(number=number, phase=phase))

        enter("build")
        outcome = judge(case, order, meter, enter)
        teller.say(Answer(number=number, outcome=outcome))
        if outcome.status in ("out_of_memory", "failed"):
            return


def judge(
    case: BenchCase, order: Order, meter: Meter, enter: Callable[[str], None]
) -> BenchOutcome:
    """What became of a case, whatever it raised."""
    try:
        return measure(case, order, meter, enter)
    except UnsupportedError as error:
        return BenchOutcome(status="unsupported", message=str(error))
    except (torch.OutOfMemoryError, MemoryError) as error:
        return BenchOutcome(status="out_of_memory", message=shorten(str(error)))
    except (Exception, SystemExit) as error:
        name = "" if isinstance(error, PlannerError) else f"{type(error).__name__}: "
        text = f"{name}{error}"
        status: BenchStatus = "out_of_memory" if is_allocation_failure(text) else "failed"
        return BenchOutcome(status=status, message=shorten(text))


def measure(
    case: BenchCase, order: Order, meter: Meter, enter: Callable[[str], None]
) -> BenchOutcome:
    started = time.monotonic()
    request = ProbeRequest(
        model=case.model,
        setting=case.setting,
        device=order.device,
        min_steps=_LEAST_SAMPLES,
        max_steps=_MOST_SAMPLES,
        median_precision=order.median_precision,
        max_measure_seconds=order.max_measure_seconds,
    )
    check_matrix_units(request)
    set_precision(request)
    subject = Subject(case, order.device)
    enter("compile" if case.is_compiled else "check")
    began = time.perf_counter()
    out, gradient = subject.first()
    meter.synchronize()
    first_seconds = time.perf_counter() - began
    enter("check")
    difference, tolerance = subject.difference(out, gradient), TOLERANCES[case.precision]
    del out, gradient
    peak = _peak_bytes(subject, meter)
    saved = subject.saved_bytes()
    enter("warm-up")
    step_seconds = _warm_up(subject, meter, request)
    enter("measure")
    rule = StopRule(request, time.monotonic(), started + order.deadline_of(case))
    samples = _sample(subject, meter, rule)
    both = [sum(sample) for sample in samples]
    return BenchOutcome(
        status="measured" if difference <= tolerance else "disagrees",
        message="" if difference <= tolerance else _disagreement(difference, tolerance),
        difference=difference,
        tolerance=tolerance,
        forward=_timing([sample.forward for sample in samples]),
        backward=_timing([sample.backward for sample in samples]),
        both=_timing(both),
        compile_seconds=max(0.0, first_seconds - step_seconds) if case.is_compiled else None,
        peak_bytes=peak,
        saved_bytes=saved,
        clocks=meter.clocks(),
        flags=(*rule.flags(both), *meter.flags()),
    )


def _warm_up(subject: Subject, meter: Meter, request: ProbeRequest) -> float:
    """Untimed passes; how long the last one took on the host's clock."""
    steps, began, took = 0, time.perf_counter(), 0.0
    while steps < request.warmup_steps or time.perf_counter() - began < request.warmup_seconds:
        start = time.perf_counter()
        subject.backward(subject.forward())
        meter.synchronize()
        took = time.perf_counter() - start
        steps += 1
    return took


def _sample(subject: Subject, meter: Meter, rule: StopRule) -> list[Sample]:
    """Forward and backward in turns until the rule has enough; at most `meter.in_flight` passes
    are queued on the device ahead of the one that is waited for."""
    samples: list[Sample] = []
    waiting: deque[Marks] = deque()

    def read() -> None:
        marks = waiting.popleft()
        samples.append(
            Sample(
                max(meter.seconds(marks.start, marks.middle), 1e-9),
                max(meter.seconds(marks.middle, marks.end), 1e-9),
            )
        )

    while not rule.is_enough([sum(sample) for sample in samples]):
        start = meter.mark()
        out = subject.forward()
        middle = meter.mark()
        gradients = subject.backward(out)
        waiting.append(Marks(start, middle, meter.mark()))
        del out, gradients
        if len(waiting) > meter.in_flight:
            read()
            meter.observe()
    while waiting:
        read()
    return samples


def _peak_bytes(subject: Subject, meter: Meter) -> int | None:
    """What a forward and backward take above what was there; None where the device's allocator
    does not tell."""
    before = meter.live_bytes()
    if before is None:
        return None
    meter.synchronize()
    meter.reset_peak()
    subject.backward(subject.forward())
    return meter.memory().peak_allocated - before


def _timing(samples: Sequence[float]) -> Timing:
    found = median_interval(samples)
    return Timing(
        median=found.median, low=found.low, high=found.high, certain=found.certain,
        samples=len(samples),
    )  # fmt: skip


def _disagreement(difference: float, tolerance: float) -> str:
    return (
        f"output or gradient is off by {difference:.2g} of what float64 gives, and at most "
        f"{tolerance:g} is rounding"
    )


if __name__ == "__main__":
    main()
