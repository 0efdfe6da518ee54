"""From the probes to the setting to use: measured, in the budget, and the plainest that wins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

from planner.core.schema import MeasurementRecord
from planner.core.schema.record import Recommendation
from planner.core.units import format_bytes
from search.loop.contenders import choose, contenders, find_plain_default, ranked
from search.loop.interrupts import ENDINGS
from search.loop.result.notes import notes_on
from search.loop.result.summary import Summary

MAX_RUNNERS_UP = 5


def recommend(records: Sequence[MeasurementRecord], summary: Summary) -> Recommendation:
    """The recommendation that the records prove; `nothing_fits` with advice where none does."""
    ran = summary.ran
    found = contenders(records, summary.budget_bytes) if ran is None else ranked(ran)
    common = {
        "model": summary.model,
        "device": summary.device,
        "versions": summary.versions,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "num_probes": len(records),
        "num_candidates": summary.num_candidates,
        "stopped_because": summary.stopped_because,
        "ruled_out": summary.ruled_out,
    }
    if not found:
        return Recommendation(
            status="nothing_fits", setting=None, evidence=None, notes=summary.notes,
            advice=_advice(records, summary), **common,
        )  # fmt: skip
    best = choose(found, summary.images)
    others = [c for c in found if c is not best]
    if summary.images is not None:
        images = summary.images
        others.sort(key=lambda c: c.total_seconds(images))
    baseline = find_plain_default(found, summary.plain_arm)
    return Recommendation(
        status="recommended",
        setting=best.setting,
        evidence=best.evidence,
        runners_up=tuple(c.evidence for c in others[:MAX_RUNNERS_UP]),
        baseline=baseline.evidence if baseline else None,
        gain=best.rate / baseline.rate if baseline else None,
        notes=(*summary.notes, *notes_on(best, found, summary)),
        **common,
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
    if not records and summary.trials_used is not None:
        return (
            f"No probe of these settings was made: --trials counts those of the whole study, which "
            f"has {summary.trials_used}. Allow more with --trials."
        )
    if not records and summary.stopped_because in ENDINGS.values():
        return "No probe was made before that: run the same command again."
    if not records and (not summary.ruled_out or "the budget" in summary.stopped_because):
        return "No probe was made: allow more time with --budget."
    memory_bound = all(r.status in ("out_of_memory", "measured") for r in records)
    if memory_bound:
        needs = [n for r in records if (n := r.used_bytes) and r.status == "measured"]
        needs += [r.predicted_bytes for r in summary.ruled_out if r.predicted_bytes]
        least = (
            f"; the least that any setting needs is about {format_bytes(min(needs))}"
            if needs
            else ""
        )
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
