"""What torch's CUDA code allocates on an emulated GPU, beside real GPUs and beside the estimate.

    python -m tests.truth.emulated_steps --real   published peaks of real GPUs beside emulated ones
    python -m tests.truth.emulated_steps          the estimate beside emulated steps, by kind

Nothing runs here: both read what tests/truth/emulated/ keeps (tests/truth/README.md).
"""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Literal

from tabulate import tabulate

from planner.core.schema import MeasurementRecord
from planner.core.units import MIB
from planner.estimation.ledgers import is_on_shapes
from search.loop.records import read_records
from tests.truth.compare import Comparison, compare

TRUTH = Path(__file__).with_name("emulated")
PEAKS = TRUTH / "peaks.jsonl"


@dataclass(frozen=True)
class Peak:
    """What somebody's program was published to take on a real GPU, and what it took on an emulated
    one. `explained` says why the two differ, or that nobody knows."""

    id: str
    source: str
    quoted: str
    quantity: Literal["allocated", "reserved"]
    measured_bytes: int
    emulated_bytes: int
    gpu: str
    measured_torch: str
    program: str
    conditions: str
    torch: str
    date: str
    emulated: bool
    explained: str = ""

    @property
    def error(self) -> float:
        """(emulated - real) / real."""
        return self.emulated_bytes / self.measured_bytes - 1


@cache
def read_peaks() -> tuple[Peak, ...]:
    """Every line of `peaks.jsonl`."""
    return tuple(Peak(**json.loads(line)) for line in PEAKS.read_text().splitlines())


@cache
def read_steps() -> tuple[MeasurementRecord, ...]:
    """Every emulated step that is kept."""
    files = sorted(TRUTH.glob("*.jsonl"))
    return tuple(r for f in files if f != PEAKS for r in read_records(f).records)


@cache
def read_emulated(one_in: int = 1) -> tuple[Comparison, ...]:
    """Emulated steps beside their estimates on shapes, each for the torch that ran it: one in so
    many."""
    return tuple(compare(r for r in read_steps()[::one_in] if is_on_shapes(r.model, r.setting)))


def kind_of(record: MeasurementRecord) -> str:
    """The kind of step that is judged together."""
    setting = record.setting
    if setting.compile != "off":
        return f"compiled, {setting.compile}"
    if setting.world_size > 1 or setting.parallelism != "none":
        return f"{setting.parallelism} on {setting.world_size}"
    if "allocator_config" in record.versions:
        return record.versions["allocator_config"]
    return "eager"


def show_peaks(peaks: Sequence[Peak]) -> str:
    rows = [
        [p.id, p.quantity, f"{p.measured_bytes / MIB:.1f}", f"{p.emulated_bytes / MIB:.1f}",
         f"{p.error:+.3%}", "(1)" if p.explained else ""]
        for p in peaks
    ]  # fmt: skip
    headers = ["published peak", "figure", "real, MiB", "emulated, MiB", "off", ""]
    counted = [p for p in peaks if not p.explained]
    return "\n".join([
        tabulate(rows, headers, disable_numparse=True),
        "",
        f"{_spread(peaks)}; without those marked (1): {_spread(counted)}.",
        *(f"(1) {reason}" for reason in dict.fromkeys(p.explained for p in peaks if p.explained)),
    ])  # fmt: skip


def _spread(peaks: Sequence[Peak]) -> str:
    errors = [abs(p.error) for p in peaks]
    return f"{len(errors)} rows, median {median(errors):.3%}, worst {max(errors):.3%}"


def show_kinds(found: Iterable[Comparison]) -> str:
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for c in found:
        groups.setdefault((kind_of(c.record), _release(c.record)), []).append(c)
    rows = [
        [kind, torch, len(steps), *_summary(steps, "allocated"), *_summary(steps, "reserved")]
        for (kind, torch), steps in sorted(groups.items(), key=_eager_first)
    ]
    headers = ["steps", "torch", "rows"]
    for quantity in ("allocated", "reserved"):
        headers += [f"{quantity}: {figure}" for figure in ("to the byte", "median", "worst")]
    return tabulate(rows, headers, disable_numparse=True)


def _release(record: MeasurementRecord) -> str:
    """2.13 of 2.13.0+cu130."""
    return ".".join(record.versions["torch"].split(".")[:2])


def _eager_first(item: tuple[tuple[str, str], object]) -> tuple[bool, str, str]:
    (kind, torch), _ = item
    return kind != "eager", kind, torch


def _summary(steps: Sequence[Comparison], quantity: str) -> tuple[str, str, str]:
    errors = [e for c in steps if (e := c.error(quantity)) is not None]
    if not errors:
        return "–", "–", "–"
    exact = sum(e == 0 for e in errors)
    return (
        f"{exact} of {len(errors)}", f"{median(map(abs, errors)):.2%}",
        f"{max(errors, key=abs):+.2%}",
    )  # fmt: skip


if __name__ == "__main__":
    real = sys.argv[1:] == ["--real"]
    print(show_peaks(read_peaks()) if real else show_kinds(read_emulated()))
