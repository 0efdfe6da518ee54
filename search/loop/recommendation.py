"""From the probes to the recommendation: the fastest setting that was measured within the budget,
and what to know beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from planner.core.schema import MeasurementRecord, TrainSetting
from planner.core.schema.record import Recommendation
from planner.core.units import format_bytes, format_seconds
from planner.report.text import describe_changes
from search.loop.signals import ENDINGS
from search.loop.space import candidate, simplicity
from search.loop.study import StudyIdentity
from search.probe.evidence import Contender

MAX_RUNNERS_UP = 5
# A simpler setting is worth a note if it costs at most this share of the best rate: a judgement.
SIMPLER_COSTS = 0.01


@dataclass(frozen=True)
class Summary:
    """What a search did.

    - `ran`: the settings that ran within the budget.
    - `asked`: the setting that the person would have used; None where its batch was not chosen.
    - `plain_arm`: the arm of the plain default; None where restrictions leave it out.
    - `least_bytes`: what the smallest setting should need.
    - `untried`: compile modes for which the budget had no time, with the seconds that each takes.
    """

    identity: StudyIdentity
    budget_bytes: int | None
    asked: TrainSetting | None
    ran: Sequence[Contender] = ()
    plain_arm: str | None = None
    plain_is_at_its_best: bool = True
    num_candidates: int = 0
    stopped_because: str = ""
    least_bytes: int | None = None
    untried: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def recommend(records: Sequence[MeasurementRecord], summary: Summary) -> Recommendation:
    """The recommendation that the records prove: `nothing_fits` with advice where no setting
    ran."""
    common = {
        **dict(summary.identity),
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
    ranking = sorted(summary.ran, key=lambda c: -c.rate)
    best, *others = ranking
    of_plain = (c for c in ranking if candidate(c.setting).arm == summary.plain_arm)
    plain = max(of_plain, key=lambda c: c.rate, default=None)
    return Recommendation(
        status="recommended",
        setting=best.setting,
        evidence=best.evidence,
        runners_up=tuple(c.evidence for c in others[:MAX_RUNNERS_UP]),
        baseline=plain.evidence if plain else None,
        gain=best.rate / plain.rate if plain and summary.plain_is_at_its_best else None,
        notes=_notes(best, plain, ranking, summary),
        **common,
    )  # fmt: skip


def _without_gain(plain: Contender | None, summary: Summary) -> str:
    """Why no gain is given: a gain is that over the plain default at its best batch, or none."""
    if summary.plain_arm is None:
        return "The plain default (fp32, eager, no checkpointing) was excluded: no gain is known."
    if plain is None or summary.plain_is_at_its_best:
        return ""
    return (
        f"The plain default was measured at batch {plain.setting.batch_size} only, and another is "
        "expected to be faster, so no gain over it is known."
    )


def _advice(records: Sequence[MeasurementRecord], summary: Summary) -> str:
    """What to do where no setting ran, by how the probes ended."""
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
    """How probes ended, none of them well."""
    ends = Counter(record.status.replace("_", " ") for record in records)
    listed = ", ".join(f"{count} {status}" for status, count in ends.items())
    last = next((r.message for r in reversed(records) if r.message), "")
    return f"No probe ended well ({listed}). The last said: {last or 'nothing'}"


# Notes: a line for each.


def _notes(
    best: Contender, plain: Contender | None, ranking: Sequence[Contender], summary: Summary
) -> tuple[str, ...]:
    """What to know about the best setting of a `ranking`, fastest first: what disturbed its probes,
    then the notes on the whole search, then how it compares with the others."""
    notes = (
        _flags_note(best),
        *summary.notes,
        _without_gain(plain, summary),
        _learning_rate_note(best.setting, summary.asked),
        _compile_note(best, ranking),
        _untried_note(summary.untried),
        _simpler_note(best, ranking),
        _heat_note(best),
    )
    return tuple(note for note in notes if note)


def _simpler_note(best: Contender, ranking: Sequence[Contender]) -> str:
    """On the simplest setting that is at most 1% slower than the best."""
    as_fast = [c for c in ranking if c.rate >= best.rate * (1 - SIMPLER_COSTS)]
    simplest = min(as_fast, key=lambda c: simplicity(c.setting))
    if simplicity(simplest.setting)[:-2] >= simplicity(best.setting)[:-2]:
        return ""
    other = describe_changes(simplest.setting, best.setting)
    slower = 1 - simplest.rate / best.rate
    return f"{other} is simpler, and measured {slower:.1%} slower, which is within the noise."


def _heat_note(best: Contender) -> str:
    if not best.slower:
        return ""
    return (
        "Most probes found the device throttled, as a training will, and it is slower the hotter "
        "it gets: settings are compared by their rates at one heat, as all probes together tell "
        "them. One that was probed while it was cooler may have measured faster."
    )


def _compile_note(best: Contender, ranking: Sequence[Contender]) -> str:
    eager = next((c for c in ranking if c.setting.compile == "off"), None)
    if best.setting.compile == "off" or eager is None:
        return ""
    spent = format_seconds(best.compile_seconds)
    gained = 1 / eager.rate - 1 / best.rate  # seconds for each image
    if gained <= 0:
        return f"Compiling takes {spent} and is not faster than the best eager setting."
    steps = max(1, round(best.compile_seconds / (gained * best.setting.images_per_device_step)))
    return (
        f"Compiling takes {spent} and pays after {steps} optimizer steps, against the fastest "
        "eager setting."
    )


def _learning_rate_note(setting: TrainSetting, asked: TrainSetting | None) -> str:
    """The usual rules for the learning rate, which are not applied: schedules are the person's."""
    new, old = setting.global_batch, asked.global_batch if asked else None
    if old is None:
        return (
            f"The global batch is {new}: scale a learning rate for a batch B by {new}/B, or its "
            "square root (often for AdamW), with warm-up; --global-batch N keeps one."
        )
    if new == old:
        return ""
    ratio = new / old
    return (
        f"The global batch is {new}, not the {old} of your setting: a learning rate for {old} is "
        f"usually scaled by {ratio:.3g} (linear rule; the Swin recipe) or {ratio**0.5:.3g} (square "
        f"root, often for AdamW), with warm-up; or keep {old} with --global-batch {old}."
    )


def _flags_note(best: Contender) -> str:
    flags = sorted({f for r in best.judged for f in r.flags})
    return f"Noted while the recommended was measured: {'; '.join(flags)}." if flags else ""


def _untried_note(seconds: Mapping[str, float]) -> str:
    """On the compile modes for which the budget had no time."""
    waits = [f"{mode} (about {format_seconds(took)})" for mode, took in seconds.items()]
    if not waits:
        return ""
    return (
        f"Not tried, as compiling takes long and the budget ended: {', '.join(waits)}. "
        "A longer --budget may find more."
    )
