"""The same step in two environments: how much longer it takes in one, how sure that is, where."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from planner.core.errors import UsageError
from planner.core.schema.profile import ProfileRecord
from planner.core.units import format_bytes, format_seconds
from planner.report.profile import sums
from planner.report.terminal import table_text, wrapped
from search.probe.evidence import DISTURBANCES, REPEAT_SHARE, others_ran
from search.probe.interval import median_interval
from search.tuning.profiling.profiling import RECORD_FILE

_MOST_ROWS = 8


@dataclass(frozen=True)
class TwoProfiles:
    """`ratio` is the second's median step over the first's, within `low` and `high`: those of the
    medians, 95% each by order statistics, and what two processes of one setting differ by. `why`
    says why nothing is concluded from it, if so. `kinds` are (kind of operation, seconds in the
    first, in the second), `memory` (what, bytes, bytes) where both are known, and of `environment`
    (what, value, value) what differs."""

    ratio: float
    low: float
    high: float
    why: str
    kinds: tuple[tuple[str, float, float], ...]
    memory: tuple[tuple[str, int, int], ...]
    environment: tuple[tuple[str, str, str], ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_profile(name: str) -> ProfileRecord | None:
    """The profile that a file, or a folder of `planner profile`, holds; None where it is another
    thing. Raises UsageError for a profile that cannot be read."""
    path = Path(name)
    path = path / RECORD_FILE if path.is_dir() else path
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        return ProfileRecord.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, ValidationError):
        if path.name != RECORD_FILE:
            return None
        raise UsageError(
            f"{path} is no profile of this version.", "Write one anew with 'planner profile'."
        ) from None


def compare_profiles(first: ProfileRecord, second: ProfileRecord) -> TwoProfiles:
    """Raises UsageError where they are not of the same model and setting."""
    one, other = first.probe, second.probe
    unlike = _fields(one.model, other.model) + _fields(one.setting, other.setting)
    if unlike:
        said = "; ".join(f"{name}: {a} and {b}" for name, a, b in unlike[:5])
        raise UsageError(f"two steps of one setting are compared, and {said}.", "Profile it again.")
    a, b = median_interval(one.step_seconds), median_interval(other.step_seconds)
    margin = 1 + REPEAT_SHARE
    flags = [*one.flags, *other.flags]
    why = others_ran(flags) or next((f for f in flags if any(w in f for w in DISTURBANCES)), "")
    if one.device.emulated or other.device.emulated:
        why = "an emulated GPU's times are predicted, not measured"
    if not why and not (a.certain and b.certain):
        why = f"only {min(len(one.step_seconds), len(other.step_seconds))} steps were timed"
    kinds, others = (sums(p.parts, lambda part: part.kind) for p in (first, second))
    seconds = [
        (kind, kinds.get(kind, (0.0, 0.0))[0], others.get(kind, (0.0, 0.0))[0])
        for kind in {**kinds, **others}
    ]
    names = ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes")
    peaks = [(n.removesuffix("_bytes"), getattr(one, n), getattr(other, n)) for n in names]
    return TwoProfiles(
        ratio=b.median / a.median,
        low=b.low / a.high / margin,
        high=b.high / a.low * margin,
        why=why,
        kinds=tuple(sorted(seconds, key=lambda row: -abs(row[2] - row[1]))),
        memory=tuple((n, x, y) for n, x, y in peaks if None not in (x, y)),
        environment=tuple(_environment(first, second)),
    )


def two_profiles_text(found: TwoProfiles) -> str:
    interval = f"between {found.low:.3g} and {found.high:.3g}"
    step = f"The second's step takes {found.ratio:.3g} times the first's ({interval})"
    if found.why:
        first = f"Not known which is faster: {found.why}. {step}."
    elif found.low <= 1 <= found.high:
        first = f"No difference that these steps show. {step}."
    else:
        first = f"{step}."
    parts = [
        wrapped(first),
        wrapped(
            "The interval divides the ends of both medians' 95% intervals, and adds "
            f"{REPEAT_SHARE:.0%}, by which two processes of one setting differ. Other days of a "
            "machine are in neither."
        ),
    ]
    peaks = [peak for peak in found.memory if peak[1] != peak[2]]
    if peaks:
        rows = [[n, format_bytes(x), format_bytes(y), f"{y / x:.3g} ×"] for n, x, y in peaks]
        parts.append(table_text(rows, ("memory", "first", "second", ""), "lr"))
    else:
        parts.append(f"Memory: {'equal to the byte' if found.memory else 'not known of both'}.")
    total = sum(y - x for _, x, y in found.kinds)
    rows = [
        [kind, format_seconds(x), format_seconds(y), _signed(y - x), f"{(y - x) / total:.0%}"]
        for kind, x, y in found.kinds[:_MOST_ROWS]
        if total
    ]
    headers = ("operation, under the profiler", "first", "second", "more", "of the difference")
    parts.append(table_text(rows, headers, "lr"))
    if found.environment:
        parts.append(table_text(found.environment, ("environment", "first", "second")))
    return "\n\n".join(part for part in parts if part)


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"


def _fields(one: BaseModel, other: BaseModel) -> list[tuple[str, str, str]]:
    a, b = one.model_dump(), other.model_dump()
    return [(n, str(a.get(n)), str(b.get(n))) for n in {**a, **b} if a.get(n) != b.get(n)]


def _environment(first: ProfileRecord, second: ProfileRecord) -> list[tuple[str, str, str]]:
    one, other = first.probe, second.probe
    versions = [
        (name, one.versions.get(name, "-"), other.versions.get(name, "-"))
        for name in {**one.versions, **other.versions}
    ]
    found = [("device", one.device.title, other.device.title), *versions]
    found.append(("driver", one.device.driver or "-", other.device.driver or "-"))
    return [row for row in found if row[1] != row[2]]
