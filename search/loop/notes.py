"""What to know beside the recommended setting: a line for each thing, the first of them kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.core.schema import TrainSetting
from planner.core.units import format_bytes, format_seconds
from planner.report.settings import describe_changes
from search.loop.contenders import Contender, break_even_steps, pareto_front, simplest_beside

MOST_NOTES = 6


def notes_on(
    best: Contender, found: Sequence[Contender], said: Sequence[str], asked: TrainSetting | None,
    images: float | None, untried: Mapping[str, float], without_gain: str,
) -> tuple[str, ...]:  # fmt: skip
    """What to know about the best setting, against the others that fit: what disturbed it first,
    then what was `said` of the whole search, at most six in all."""
    candidates = (
        _flags_note(best),
        *said,
        without_gain,
        _learning_rate_note(best.setting, asked),
        _compile_note(best, found),
        untried_note(untried),
        _simpler_note(best, found, images),
        _heat_note(best, found),
        _length_note(best, images),
        _pareto_note(found),
    )
    return tuple([note for note in candidates if note][:MOST_NOTES])


def _simpler_note(best: Contender, found: Sequence[Contender], images: float | None) -> str:
    simpler = simplest_beside(best, found) if images is None else None
    if simpler is None:
        return ""
    other = describe_changes(simpler.setting, best.setting)
    slower = 1 - simpler.rate / best.rate
    return f"{other} is simpler, and measured {slower:.1%} slower, which is within the noise."


def _heat_note(best: Contender, found: Sequence[Contender]) -> str:
    if not best.slower:
        return ""
    highest = best.measured_rate
    cooler = [c for c in found if c.measured_rate > highest and c.rate < best.rate]
    others = "; ".join(describe_changes(c.setting, best.setting) for c in cooler)
    return (
        "Most probes found the device throttled, as a training will, and it is slower the hotter "
        "it gets: the gain, and what is compared in these notes, are of rates at one heat, as all "
        "probes together tell them."
        + (f" Measured faster, while it was cooler: {others}." if others else "")
    )


def _compile_note(best: Contender, found: Sequence[Contender]) -> str:
    eager = next((c for c in found if c.setting.compile == "off"), None)
    if best.setting.compile == "off" or eager is None:
        return ""
    steps = break_even_steps(best, eager)
    spent = format_seconds(best.compile_seconds)
    if steps is None:
        return f"Compiling takes {spent} and is not faster than the best eager setting."
    return (
        f"Compiling takes {spent} and pays after {steps} optimizer steps, against the fastest "
        "eager setting."
    )


def _pareto_note(found: Sequence[Contender]) -> str:
    """What less memory costs: the front of throughput against memory."""
    kept = [c for c in pareto_front(found) if c.num_bytes is not None]
    if len(kept) < 2:
        return ""
    points = [
        f"{c.rate:.4g} {c.evidence.counts}/s in {format_bytes(c.num_bytes or 0)}" for c in kept
    ]
    return f"Throughput against memory: {', '.join(points)}."


def _length_note(best: Contender, images: float | None) -> str:
    if images is None:
        return ""
    total = format_seconds(best.total_seconds(images))
    return (
        f"Ranked by total time for {images:.0f} {best.evidence.counts} of this device: "
        f"{total}, {format_seconds(best.compile_seconds)} of it compiling."
    )


def _learning_rate_note(setting: TrainSetting, asked: TrainSetting | None) -> str:
    """The usual rules, given and not applied: schedules are the person's."""
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


def untried_note(seconds: Mapping[str, float]) -> str:
    """The compile modes that the budget ended before, and how long each takes."""
    waits = [f"{mode} (about {format_seconds(took)})" for mode, took in seconds.items()]
    if not waits:
        return ""
    return (
        f"Not tried, as compiling takes long and the budget ended: {', '.join(waits)}. "
        "A longer --budget may find more."
    )
