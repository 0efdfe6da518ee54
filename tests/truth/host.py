"""Eager Swins on the H200 and the H100: the rate that was measured beside the predicted one, of a
host that nobody measured: `python -m tests.truth.host`.

With --law the processor seconds of emulated steps (`host_steps.json`: torch 2.14.1, one core of an
AMD EPYC, 2026-11-29; the median of nine steps, of three runs the least) beside the law's.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

from tabulate import tabulate

from planner.core.schema import MeasurementRecord
from planner.throughput.rates import HOST_SECONDS, rates_for
from planner.throughput.result import HOST_WAIT, Throughput
from search.loop.records import read_records
from tests.truth.compare import gpu_of, is_swin, predicted_step

TRUTH = Path(__file__).parent
CARDS = ("h200", "h100")
FACTOR = 2.6  # the assumed host's seconds, over those of the machine that ran the emulated steps


@dataclass(frozen=True)
class HostRow:
    """A measured step and what is predicted of it."""

    card: str
    record: MeasurementRecord
    predicted: Throughput

    @property
    def measured(self) -> float:
        """Images a second."""
        setting = self.record.setting
        return setting.images_per_device_step / median(self.record.step_seconds)

    @property
    def error(self) -> float:
        """(predicted - measured) / measured, of the rate."""
        return self.predicted.images_per_second / self.measured - 1

    @property
    def is_within(self) -> bool:
        """Whether the measured rate is in the predicted range."""
        off = self.measured / self.predicted.images_per_second - 1
        return abs(off) <= self.predicted.uncertainty

    @property
    def waits(self) -> bool:
        """Whether the host takes longer than the device."""
        waited = self.predicted.kind_seconds.get(HOST_WAIT, 0.0)
        return self.predicted.host_seconds > self.predicted.step_seconds - waited


@cache
def host_rows() -> tuple[HostRow, ...]:
    """All eager steps of Swins."""
    return tuple(row for card in CARDS for row in _rows(card))


def _rows(card: str) -> Iterator[HostRow]:
    for record in read_records(TRUTH / card / "rows.jsonl").records:
        is_eager = record.status == "measured" and record.setting.compile == "off"
        gpu = gpu_of(record)
        if not is_eager or not is_swin(record.model) or gpu is None:
            continue
        yield HostRow(card, record, predicted_step(record, rates_for(gpu, record.model)))


def within(rows: Sequence[HostRow], share: float) -> float:
    """The error that so large a share of `rows` does not exceed."""
    return sorted(abs(row.error) for row in rows)[round(share * len(rows)) - 1]


def show() -> str:
    table = []
    for what in ("all", "the host takes longer"):
        rows = [row for row in host_rows() if what == "all" or row.waits]
        table.append([
            what, len(rows), sum(not row.is_within for row in rows), f"{within(rows, 0.5):.0%}",
            f"{within(rows, 0.9):.0%}", f"{within(rows, 1.0):.0%}",
            f"{median(row.predicted.uncertainty for row in rows):.0%}",
        ])  # fmt: skip
    headers = ["steps", "rows", "out of their range", "median error",
               "nine of ten within", "worst", "median range"]  # fmt: skip
    return tabulate(table, headers, disable_numparse=True)


def show_law() -> str:
    """How far the law is off the emulated steps, in the seconds of the machine that ran them."""
    errors: dict[str, list[float]] = {}
    for step in json.loads((TRUTH / "host_steps.json").read_text()):
        law = sum(step[what] * s for what, s in HOST_SECONDS.items() if what in step) / FACTOR
        kind = "Swins" if "swin" in step["step"] else "others"
        errors.setdefault(kind, []).append(abs(law / step["seconds"] - 1))
    return "\n".join(f"{k}: {len(of)} steps, median {median(of):.0%}" for k, of in errors.items())


if __name__ == "__main__":
    print(show_law() if sys.argv[1:] == ["--law"] else show())
