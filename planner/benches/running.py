"""Runs the cases of a benchmark, each library's of a shape in a process of their own; a case that
crashes, runs out of memory or is late is a record with its reason, and the next goes on in a fresh
process. Imports no torch.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from planner.benches.on_shapes import count_work
from planner.benches.order import ANSWERS, WORKER_COMMAND, Order
from planner.benches.shares import peaks_of
from planner.environment.rates import measuring_environment
from planner.schema import DeviceInfo
from planner.schema.bench import BenchCase, BenchOutcome, BenchRecord
from planner.throughput.prediction import DeviceRates
from search.probe.device import describe_device, versions
from search.probe.failure import count_kernel_kills, judge_death
from search.probe.parent.environment import probe_environment
from search.probe.parent.supervised import Ended, run_supervised
from search.probe.protocol import AnswerReader

# Until the first case begins: torch and a library are imported, from a network disk in a minute.
IMPORT_SECONDS = 120.0


@dataclass(frozen=True)
class Limits:
    """Seconds: of one case (None: as `Order.deadline_of`), of the timing in it, and of all (None:
    no limit); and how well the median is to be known, as a share."""

    deadline_seconds: float | None = None
    measure_seconds: float = 3.0
    budget_seconds: float | None = None
    median_precision: float = 0.01


def run_cases(
    cases: Sequence[BenchCase],
    device: str,
    limits: Limits,
    on_record: Callable[[BenchRecord], None],
    rates: DeviceRates | None = None,
    command: Sequence[str] = WORKER_COMMAND,
) -> list[BenchCase]:
    """Time `cases` on `device` ("cpu", "cuda:N"); `on_record` is given each record as it is there.

    Returns the cases that the budget left no time for. Raises UsageError where there is no such
    device. `command` is the worker, with its two arguments to come.
    """
    described, known = describe_device(device), versions()
    budget = limits.budget_seconds
    end = time.monotonic() + budget if budget is not None else float("inf")
    left: list[BenchCase] = []

    for _, together in itertools.groupby(cases, key=lambda c: (c.shape, c.library, c.version)):
        waiting = list(together)
        while waiting and time.monotonic() < end:
            run = _Run(waiting, device, limits, end)
            for case, outcome in run.outcomes(command):
                on_record(_record(case, outcome, described, known, rates))
                waiting.remove(case)
            if run.is_cut_short:
                break
        left += waiting
    return left


class _Run:
    """One process with some cases: what it has said, and when it is late."""

    def __init__(self, cases: Sequence[BenchCase], device: str, limits: Limits, end: float) -> None:
        self.order = Order(
            cases=tuple(cases),
            device=device,
            deadline_seconds=limits.deadline_seconds,
            median_precision=limits.median_precision,
            max_measure_seconds=limits.measure_seconds,
        )
        self.end = end
        self.deadline = time.monotonic() + IMPORT_SECONDS + self.order.deadline_of(cases[0])
        self.is_cut_short = False
        self.phase = "import"
        self.found: list[BenchOutcome] = []
        self.reader = AnswerReader("", ANSWERS)

    def outcomes(self, command: Sequence[str]) -> Iterator[tuple[BenchCase, BenchOutcome]]:
        """Each case that came to an end, and how: at least one, unless the budget ended first."""
        kills = count_kernel_kills()
        with measuring_environment():
            environment = probe_environment()
        ended = run_supervised(
            command, self.hear, lambda: min(self.deadline, self.end), environment,
            [self.order.model_dump_json()],
        )  # fmt: skip
        failed = self.found and self.found[-1].status in ("out_of_memory", "failed")
        if len(self.found) < len(self.order.cases) and not failed:
            self.is_cut_short = ended.late and self.deadline > self.end
            if not self.is_cut_short:
                self.found.append(self._judge(ended, kills))
        yield from zip(self.order.cases, self.found, strict=False)

    def hear(self, data: bytes) -> None:
        for answer in self.reader.feed(data):
            if answer.outcome is not None:
                self.found.append(answer.outcome)
                self.phase = "start"
            elif answer.phase:
                if answer.phase == "build":
                    case = self.order.cases[answer.number]
                    self.deadline = time.monotonic() + self.order.deadline_of(case)
                self.phase = answer.phase

    def _judge(self, ended: Ended, kills: int | None) -> BenchOutcome:
        """The outcome of the case in which the process ended."""
        if ended.late:
            seconds = self.order.deadline_of(self.order.cases[len(self.found)])
            return BenchOutcome(
                status="timed_out", message=f"not done after {seconds:g} s, in {self.phase}"
            )
        if ended.wait_status is None:
            return BenchOutcome(status="crashed", message="its supervisor was ended from outside")
        status, message = judge_death(ended.wait_status, ended.words, kills, f", in {self.phase}")
        return BenchOutcome(status=status, message=message)


def _record(
    case: BenchCase,
    outcome: BenchOutcome,
    device: DeviceInfo,
    known: dict[str, str],
    rates: DeviceRates | None,
) -> BenchRecord:
    """What a case came to, with what shapes and rates say of it."""
    found = outcome.model_dump()
    if outcome.both is not None:
        work = count_work(case)
        found |= {"forward_work": work.forward, "backward_work": work.backward}
        if outcome.peak_bytes is not None:
            found["peak_from"] = "measured"
        elif not case.is_compiled:  # only the compiler knows what compiled attention keeps
            found |= {"peak_bytes": work.peak_bytes, "peak_from": "ledger"}
    return BenchRecord.model_validate(
        {
            **found,
            "case": case,
            "device": device,
            "versions": known,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "peaks": peaks_of(device, rates, case.precision),
        }
    )
