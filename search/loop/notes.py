"""What to know beside the recommended setting: a line for each thing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.core.schema import TrainSetting
from planner.core.units import format_seconds
from planner.report.settings import describe_changes
from search.loop.contenders import Contender
from search.loop.space import simplicity

# Of the best rate, that a simpler setting may cost to be worth a note: a judgement.
SIMPLER_COSTS = 0.01


def notes_on(
    best: Contender, found: Sequence[Contender], said: Sequence[str], asked: TrainSetting | None,
    images: float | None, untried: Mapping[str, float], without_gain: str,
) -> tuple[str, ...]:  # fmt: skip
    """What to know about the best setting, against the others that fit, fastest first: what
    disturbed it, then what was `said` of the whole search."""
    notes = (
        _flags_note(best),
        *said,
        without_gain,
        _learning_rate_note(best.setting, asked),
        _compile_note(best, found),
        _untried_note(untried),
        _simpler_note(best, found) if images is None else _length_note(best, images),
        _heat_note(best),
    )
    return tuple(note for note in notes if note)


def _simpler_note(best: Contender, found: Sequence[Contender]) -> str:
    """Of the simplest that is at most 1% slower than the best."""
    level = [c for c in found if c.rate >= best.rate * (1 - SIMPLER_COSTS)]
    simplest = min(level, key=lambda c: simplicity(c.setting))
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


def _compile_note(best: Contender, found: Sequence[Contender]) -> str:
    eager = next((c for c in found if c.setting.compile == "off"), None)
    if best.setting.compile == "off" or eager is None:
        return ""
    spent = format_seconds(best.compile_seconds)
    gained = 1 / eager.rate - 1 / best.rate  # seconds of an image
    if gained <= 0:
        return f"Compiling takes {spent} and is not faster than the best eager setting."
    steps = max(1, round(best.compile_seconds / (gained * best.images)))
    return (
        f"Compiling takes {spent} and pays after {steps} optimizer steps, against the fastest "
        "eager setting."
    )


def _length_note(best: Contender, images: float) -> str:
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


def _untried_note(seconds: Mapping[str, float]) -> str:
    """The compile modes that the budget ended before, and how long each takes."""
    waits = [f"{mode} (about {format_seconds(took)})" for mode, took in seconds.items()]
    if not waits:
        return ""
    return (
        f"Not tried, as compiling takes long and the budget ended: {', '.join(waits)}. "
        "A longer --budget may find more."
    )
