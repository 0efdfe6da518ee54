"""From the probes to the setting to use: the fastest that was measured in the budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from planner.core.schema import DeviceInfo, MeasurementRecord, Model, TrainSetting
from planner.core.schema.record import Recommendation
from planner.core.units import format_bytes
from search.loop.contenders import Contender
from search.loop.interrupts import ENDINGS
from search.loop.notes import notes_on
from search.loop.space import candidate

MAX_RUNNERS_UP = 5


@dataclass(frozen=True)
class Summary:
    """What a search did. `ran` is what ran within the budget. `images` is a whole training's, on
    one device, where a length was asked for; `asked` the setting the person would have used (None
    where its batch was not chosen), `plain_arm` the arm of the plain default, None where it was
    left out. `least_bytes` is what the smallest setting should need.
    `untried` are compile modes that the budget ended before, with the seconds each takes."""

    model: Model
    device: DeviceInfo
    versions: dict[str, str]
    budget_bytes: int | None
    asked: TrainSetting | None
    ran: Sequence[Contender] = ()
    plain_arm: str | None = None
    plain_is_at_its_best: bool = True
    images: float | None = None
    num_candidates: int = 0
    stopped_because: str = ""
    least_bytes: int | None = None
    untried: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def recommend(records: Sequence[MeasurementRecord], summary: Summary) -> Recommendation:
    """The recommendation that the records prove; `nothing_fits` with advice where none does."""
    common = {
        "model": summary.model,
        "device": summary.device,
        "versions": summary.versions,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "num_probes": len(records),
        "num_candidates": summary.num_candidates,
        "stopped_because": summary.stopped_because,
    }
    if not summary.ran:
        return Recommendation(
            status="nothing_fits", setting=None, evidence=None, notes=summary.notes,
            advice=_advice(records, summary), **common,
        )  # fmt: skip
    found = sorted(summary.ran, key=lambda c: -c.rate_over(summary.images))
    best, *others = found
    of_plain = (c for c in found if candidate(c.setting).arm == summary.plain_arm)
    plain = max(of_plain, key=lambda c: c.rate, default=None)
    return Recommendation(
        status="recommended",
        setting=best.setting,
        evidence=best.evidence,
        runners_up=tuple(c.evidence for c in others[:MAX_RUNNERS_UP]),
        baseline=plain.evidence if plain else None,
        gain=best.rate / plain.rate if plain and summary.plain_is_at_its_best else None,
        notes=notes_on(
            best, found, summary.notes, summary.asked, summary.images, summary.untried,
            _without_gain(plain, summary),
        ),
        **common,
    )  # fmt: skip


def _without_gain(plain: Contender | None, summary: Summary) -> str:
    """Why no gain is told: it is that over the plain default at its best batch, or none."""
    if summary.plain_arm is None:
        return "The plain default (fp32, eager, no checkpointing) was excluded: no gain is told."
    if plain is None or summary.plain_is_at_its_best:
        return ""
    return (
        f"The plain default was measured at batch {plain.setting.batch_size} only, and another is "
        "expected to be faster: no gain over it is told."
    )


def _advice(records: Sequence[MeasurementRecord], summary: Summary) -> str:
    """What would make it fit, from how the probes (or the estimate) failed."""
    if records and all(r.cut_short for r in records):
        phase = records[-1].phase
        last = f" (the last was at: {phase})" if phase else ""
        return (
            f"The budget ended before any probe did{last}: allow more time with --budget, or see "
            "whether the model hangs there."
        )
    if records and records[-1].lost_device:
        return (
            f"The device failed before anything was on it: {records[-1].message.splitlines()[0]}. "
            "See whether nvidia-smi lists it, reset it or start the machine anew, and run the same "
            "command to go on."
        )
    if records and all(r.inconclusive for r in records):
        return (
            "Other processes held or took the memory that every probe was to have: free the "
            "device, and run the same command to go on."
        )
    records = [r for r in records if not r.inconclusive]
    if not records and "--trials" in summary.stopped_because:
        return (
            "No probe of these settings was made: --trials counts those of the whole study. Allow "
            "more with --trials."
        )
    if not records and summary.stopped_because in ENDINGS.values():
        return "No probe was made before that: run the same command again."
    if not records and "the budget" in summary.stopped_because:
        return "No probe was made: allow more time with --budget."
    memory_bound = all(r.status in ("out_of_memory", "measured") for r in records)
    if memory_bound:
        least = ""
        if summary.least_bytes is not None:
            needed = format_bytes(summary.least_bytes)
            least = f"; the least that any setting needs is about {needed}"
        budget = (
            format_bytes(summary.budget_bytes) if summary.budget_bytes else "the device's memory"
        )
        return (
            f"Nothing fits in {budget}{least}. Allow batch 1, checkpointing blocks and bf16 if "
            "they were excluded; lower --headroom; free the device of other processes; or choose "
            "a smaller model or --image-size."
        )
    return how_ended(records)


def how_ended(records: Sequence[MeasurementRecord]) -> str:
    """For probes of which none ended well."""
    ends = Counter(record.status.replace("_", " ") for record in records)
    listed = ", ".join(f"{count} {status}" for status, count in ends.items())
    last = next((r.message for r in reversed(records) if r.message), "")
    return f"No probe ended well ({listed}). The last said: {last or 'nothing'}"
