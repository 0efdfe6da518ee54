"""Records of benchmarks on disk, one JSON line each: appended, read, and two files compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.errors import PlannerError
from planner.files import MAX_RESULT_BYTES, read_text
from planner.schema import DeviceInfo
from planner.schema.bench import BenchCase, BenchRecord
from search.study.records import append_records, parse_records


def append_record(path: Path, record: BenchRecord) -> None:
    """Raises RecordsNotWrittenError."""
    append_records(path, [record])


def read_records(path: Path) -> tuple[BenchRecord, ...]:
    """All of a file. Raises UsageError where it cannot be read, PlannerError where a line is no
    record of a benchmark."""
    found = parse_records(read_text(path, MAX_RESULT_BYTES).encode(), str(path), BenchRecord)
    if found.fault:
        raise PlannerError(f"{found.fault}.", "Remove the line, or measure into another file.")
    return found.records


@dataclass(frozen=True)
class Side:
    """What one file says of its newest environment: the last record of each case. `others` counts
    the records of other environments, which are left out."""

    device: DeviceInfo
    versions: dict[str, str]
    records: dict[BenchCase, BenchRecord]
    others: int


@dataclass(frozen=True)
class Difference:
    """One case in both environments. `ratio` is the second's time over the first's; `is_real` says
    that the two intervals do not overlap, and `least` is then how near to 1 it may be."""

    first: BenchRecord
    second: BenchRecord
    ratio: float
    is_real: bool
    least: float

    @property
    def verdict(self) -> str:
        if not self.is_real:
            return "no difference shown"
        word = "slower" if self.ratio > 1 else "faster"
        by = abs(_change(self.ratio))
        return f"{word} by {by:.1%} (at least {abs(_change(self.least)):.1%})"


def _change(ratio: float) -> float:
    """In speed: half of the time is 100% faster, and twice the time 50% slower."""
    return 1 / ratio - 1


@dataclass(frozen=True)
class Comparison:
    """Two files, case by case; `changed` is what differs between the environments, "torch" ->
    (first, second); `not_compared` are cases that one of them lacks or did not measure."""

    first: Side
    second: Side
    changed: dict[str, tuple[str, str]]
    differences: tuple[Difference, ...]
    not_compared: tuple[BenchCase, ...]


def compare(first: Sequence[BenchRecord], second: Sequence[BenchRecord]) -> Comparison:
    """Raises PlannerError where a side has no record."""
    a, b = newest_environment(first), newest_environment(second)
    both = [case for case in a.records if case in b.records]
    differences = [
        found for case in both if (found := _difference(a.records[case], b.records[case]))
    ]
    compared = {difference.first.case for difference in differences}
    everything = dict.fromkeys([*a.records, *b.records])
    return Comparison(
        a,
        b,
        _changed(a, b),
        tuple(differences),
        tuple(case for case in everything if case not in compared),
    )


def newest_environment(records: Sequence[BenchRecord]) -> Side:
    """The environment of the last record, and what was measured in it."""
    if not records:
        raise PlannerError(
            "a file holds no record of a benchmark to compare.",
            "Name two files that 'planner bench attention' wrote.",
        )
    last = records[-1]
    same = [r for r in records if (r.device, r.versions) == (last.device, last.versions)]
    return Side(last.device, last.versions, {r.case: r for r in same}, len(records) - len(same))


def _difference(first: BenchRecord, second: BenchRecord) -> Difference | None:
    """None where one of them has no time, or a wrong result."""
    if first.status != "measured" or second.status != "measured":
        return None
    a, b = first.both, second.both
    assert a is not None
    assert b is not None
    ratio = b.median / a.median
    apart = b.low > a.high or b.high < a.low
    least = b.low / a.high if ratio > 1 else b.high / a.low
    return Difference(first, second, ratio, apart and a.certain and b.certain, least)


def _changed(first: Side, second: Side) -> dict[str, tuple[str, str]]:
    a, b = (dict(_environment(side)) for side in (first, second))
    names = dict.fromkeys([*a, *b])
    return {n: (a.get(n, "none"), b.get(n, "none")) for n in names if a.get(n) != b.get(n)}


def _environment(side: Side) -> Iterable[tuple[str, str]]:
    yield "device", side.device.name
    if side.device.driver is not None:
        yield "driver", side.device.driver
    yield from side.versions.items()
