"""How records of a benchmark are shown: a table for each shape; two environments side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from planner.schema.bench import BenchCase, BenchRecord, Timing
from planner.units import format_bytes

if TYPE_CHECKING:
    from planner.benches.records import Comparison

HEADERS = (
    "library", "Swin", "windows", "precision", "path", "forward ms", "backward ms", "both ms",
    "FLOP/s", "of matmul", "bytes/s", "of copy", "peak", "saved", "off by",
)  # fmt: skip
_WORDS = {
    "disagrees": "wrong result", "unsupported": "unsupported", "out_of_memory": "out of memory",
    "failed": "failed", "crashed": "crashed", "timed_out": "timed out",
}  # fmt: skip


def describe_case(case: BenchCase) -> str:
    """`timm version 1, shifted, bf16, compiled-eager`."""
    return f"{case.library} version {case.version}, {_windows(case)}, {case.precision}, {case.path}"


def describe_shape(case: BenchCase) -> str:
    """`guide: [2, 56, 56, 96], window 7, 3 heads`."""
    height, width = case.feature_map
    return (
        f"{case.shape}: [{case.batch_size}, {height}, {width}, {case.channels}], "
        f"window {case.window}, {case.heads} heads"
    )


def outcome_line(record: BenchRecord) -> str:
    """One line as soon as a case has ended."""
    if record.both is None:
        return f"{describe_case(record.case)}: {_WORDS[record.status]}: {_first_line(record)}"
    wrong = "" if record.status == "measured" else f"; WRONG: {record.message}"
    return f"{describe_case(record.case)}: {_milliseconds(record.both)} ms{wrong}"


def bench_text(records: Sequence[BenchRecord], table_format: str = "simple") -> str:
    """A table for each shape, in the order of the records, and what is to be said of all."""
    from tabulate import tabulate

    parts = []
    for title, together in groupby(records, key=lambda record: describe_shape(record.case)):
        of_shape = list(together)
        rows = [_row(record) for record in of_shape]
        table = tabulate(
            rows, headers=HEADERS, tablefmt=table_format, missingval="", disable_numparse=True,
            colalign=("left",) * 5 + ("right",) * 10,
        )  # fmt: skip
        parts.append("\n\n".join([title, table, *_faults(of_shape)]))
    return "\n\n".join([*parts, *bench_notes(records)])


def bench_notes(records: Sequence[BenchRecord]) -> list[str]:
    """Where and with what the records were made, and what their columns stand for."""
    if not records:
        return []
    last = records[-1]
    versions = ", ".join(f"{name} {version}" for name, version in last.versions.items())
    notes = [f"{last.device.name}; {versions}; {last.date[:10]}."]
    if last.device.kind == "cpu":
        notes.append("Seconds are those of the thread that calls: others' work does not count.")
    bases = dict.fromkeys(r.peaks.basis for r in records if r.peaks is not None)
    if bases:
        notes.append(f"Shares are of the rates {'; '.join(bases)}.")
    else:
        notes.append("No rates of this device are known: 'planner doctor --rates' measures them.")
    if any(record.peak_from == "ledger" for record in records):
        notes.append(
            "The peak is that of the ledger by shapes, as on a GPU: a CPU's allocator tells none."
        )
    return notes


def comparison_text(found: Comparison) -> str:
    """What differs between two environments, then each case with a verdict."""
    from tabulate import tabulate

    lines = []
    for name, (first, second) in found.changed.items():
        lines.append(f"{name}: {first} -> {second}")
    if not lines:
        lines.append("Nothing that is recorded of the two environments differs.")
    for which, side in (("first", found.first), ("second", found.second)):
        if side.others:
            lines.append(
                f"{side.others} records of other environments in the {which} are left out."
            )
    rows = []
    for one in found.differences:
        assert one.first.both is not None
        assert one.second.both is not None
        rows.append(
            (
                one.first.case.shape, describe_case(one.first.case),
                _milliseconds(one.first.both), _milliseconds(one.second.both), one.verdict,
            )
        )  # fmt: skip
    if rows:
        headers = ("shape", "case", "first ms", "second ms", "the second is")
        lines += ["", tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True)]
    if found.not_compared:
        lines += ["", f"{len(found.not_compared)} cases were not measured in both:"]
        lines += [f"  {case.shape}: {describe_case(case)}" for case in found.not_compared]
    return "\n".join(lines)


def _row(record: BenchRecord) -> tuple[str | None, ...]:
    case = record.case
    named = (case.library, str(case.version), _windows(case), case.precision, case.path)
    if record.both is None or record.forward is None or record.backward is None:
        return (*named, _WORDS[record.status])
    wrong = "" if record.status == "measured" else " WRONG"
    return (
        *named,
        f"{1000 * record.forward.median:.3g}",
        f"{1000 * record.backward.median:.3g}",
        _milliseconds(record.both),
        _rate(record.flops_per_second),
        _share(record.flop_share),
        _rate(record.bandwidth),
        _share(record.bandwidth_share),
        None if record.peak_bytes is None else format_bytes(record.peak_bytes, 1),
        None if record.saved_bytes is None else format_bytes(record.saved_bytes, 1),
        None if record.difference is None else f"{record.difference:.1e}{wrong}",
    )


def _faults(records: Iterable[BenchRecord]) -> list[str]:
    """The reason of each case without a time, or with a wrong result."""
    return [
        f"{describe_case(r.case)}: {_WORDS[r.status]}: {_first_line(r)}"
        for r in records
        if r.status != "measured"
    ]


def _first_line(record: BenchRecord) -> str:
    return record.message.strip().split("\n", 1)[0]


def _windows(case: BenchCase) -> str:
    return "shifted" if case.shifted else "plain"


def _milliseconds(timing: Timing) -> str:
    """`12.3 [12.1, 12.6]`; what may lie outside the interval is said by a tilde."""
    low, high = (f"{1000 * value:.3g}" for value in (timing.low, timing.high))
    return f"{1000 * timing.median:.3g} {'' if timing.certain else '~'}[{low}, {high}]"


def _rate(per_second: float | None) -> str | None:
    return None if per_second is None else f"{per_second / 1e9:.3g} G"


def _share(share: float | None) -> str | None:
    return None if share is None else f"{share:.0%}"
