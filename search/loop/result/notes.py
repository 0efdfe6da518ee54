"""What to know beside the recommended setting, a line each."""

from __future__ import annotations

from collections.abc import Sequence

from planner.core.errors import PlannerError
from planner.core.schema import MeasurementRecord, TrainSetting
from planner.core.schema.setting import COMPILE_MODES
from planner.core.units import format_bytes, format_seconds
from planner.estimation.estimate import estimate
from planner.estimation.ledgers import is_on_shapes
from planner.machine.hardware import recognise_gpu
from planner.machine.hardware.precisions import peak_flops
from planner.report.settings import describe_changes
from planner.report.time import bound_text
from search.loop.contenders import Contender, break_even_steps, pareto_front
from search.loop.options import SearchOptions
from search.loop.result.summary import Summary
from search.loop.surrogate.posterior import Posterior
from search.loop.surrogate.probe_cost import compilation_of

# Of the time; a step that keeps the device busy shows 95 to 100. A judgement.
_BUSY_PERCENT = 90
# Of the datasheet's FLOP/s: no whole step comes near it, whatever the clock. A judgement.
_MOST_OF_PEAK = 1.05


def notes_on(best: Contender, found: Sequence[Contender], summary: Summary) -> list[str]:
    """What to know about the best setting, against the others that fit."""
    candidates = (
        _simpler_note(best, found, summary),
        _heat_note(best, found),
        _compile_note(best, found),
        _bound_note(best, summary),
        _idle_note(best),
        _levers_note(best, found),
        _length_note(best, summary),
        _pareto_note(found),
        _learning_rate_note(best.setting, summary.asked),
        _flags_note(best),
    )
    return [note for note in candidates if note]


def _simpler_note(best: Contender, found: Sequence[Contender], summary: Summary) -> str:
    fastest = found[0]
    if fastest is best or summary.images is not None:
        return ""
    other = describe_changes(fastest.setting, best.setting)
    faster = f"{fastest.rate / best.rate - 1:.1%} faster"
    how = f"is {faster} at one heat" if fastest.slower else f"measured {faster}"
    return f"{other} {how}, which is within the noise: the simpler setting is recommended."


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


def _bound_note(best: Contender, summary: Summary) -> str:
    """What the step waits for, as `planner advise` says it, and the measured share of the peak;
    only where the model is estimated on shapes and the catalogue has the card."""
    device = summary.device
    gpu = recognise_gpu(device.name, device.total_bytes) if device.kind == "cuda" else None
    if gpu is None or not is_on_shapes(summary.model, best.setting):
        return ""
    try:
        time = estimate(summary.model, best.setting, gpu=gpu).throughput
    except PlannerError:
        return ""
    if time is None:
        return ""
    said = f"{bound_text('the recommended step', time.bound_seconds)} (predicted)."
    peak = peak_flops(gpu, best.setting.precision)
    if peak is None or device.emulated:
        return said
    share = time.matrix_flops / best.step_seconds / peak
    if share > _MOST_OF_PEAK:
        return (
            f"{said} As measured, it is faster than the card's peak FLOP/s allow, which cannot be: "
            "the clock or the device is not real."
        )
    return f"{said} As measured, it runs at {share:.0%} of the card's peak FLOP/s."


def _idle_note(best: Contender) -> str:
    """Only where the device stood idle: a high figure would say next to nothing."""
    clocks = best.evidence.clocks
    busy = clocks.busy_percent if clocks is not None else None
    if busy is None or busy.median >= _BUSY_PERCENT:
        return ""
    return (
        f"Some kernel ran on the GPU for only {busy.median:.0f}% of the time (nvidia-smi's "
        "utilisation, which does not say how full the card was): for the rest it waited for the "
        "host. 'planner profile' shows where."
    )


def _levers_note(best: Contender, found: Sequence[Contender]) -> str:
    """What single levers do to the recommended setting, by the probes: of each field the fastest
    other value that was measured at the same batch."""
    others: dict[str, Contender] = {}
    for c in found:
        fields = c.setting.differences(best.setting)
        if len(fields) == 1 and "batch_size" not in fields:
            others.setdefault(next(iter(fields)), c)
    if not others:
        return ""
    said = [_lever_text(c, best) for c in others.values()]
    return f"One change of the recommended, measured at the same batch: {'; '.join(said)}."


def _lever_text(other: Contender, best: Contender) -> str:
    text = (
        f"{describe_changes(other.setting, best.setting)} {other.rate / best.rate:.2f} × the rate"
    )
    if other.num_bytes is None or best.num_bytes is None:
        return text
    more = other.num_bytes - best.num_bytes
    return f"{text}, {format_bytes(abs(more))} {'more' if more > 0 else 'less'}"


def _pareto_note(found: Sequence[Contender]) -> str:
    """What less memory costs: the front of throughput against memory."""
    kept = [c for c in pareto_front(found) if c.num_bytes is not None]
    if len(kept) < 2:
        return ""
    points = [
        f"{c.rate:.4g} {c.evidence.counts}/s in {format_bytes(c.num_bytes or 0)}" for c in kept
    ]
    return f"Throughput against memory: {', '.join(points)}."


def _length_note(best: Contender, summary: Summary) -> str:
    if summary.images is None:
        return ""
    total = format_seconds(best.total_seconds(summary.images))
    return (
        f"Ranked by total time for {summary.images:.0f} {best.evidence.counts} of this device: "
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


def untried_note(
    records: Sequence[MeasurementRecord], posterior: Posterior, options: SearchOptions, stopped: str
) -> list[str]:
    """The compile modes that the budget ended before, and how long each takes; none where no
    setting ran at all."""
    if options.strategy != "planner" or "budget" not in stopped:
        return []
    if records and all(r.status in ("crashed", "unsupported") for r in records):
        return []
    ends = {r.status for r in records if r.setting.compile != "off"}
    if ends and "measured" not in ends:
        return []  # no compiler here, as far as was seen
    tried = {"off", *(r.setting.compile for r in records)}
    firsts = {c.setting.compile: c.setting for c in reversed(posterior.space.candidates)}
    seconds = {
        mode: posterior.costs.compile_seconds(compilation_of(firsts[mode]))
        for mode in COMPILE_MODES
        if mode in firsts and mode not in tried
    }
    waits = [f"{mode} (about {format_seconds(took)})" for mode, took in seconds.items()]
    if not waits:
        return []
    return [
        f"Not tried, as compiling takes long and the budget ended: {', '.join(waits)}. "
        "A longer --budget may find more."
    ]


def plain_default_note(arm: str | None, options: SearchOptions) -> list[str]:
    if arm is not None or not options.baseline:
        return []
    return [
        "The plain default (fp32, eager, no checkpointing) was excluded, so no speed-up is "
        "reported."
    ]
