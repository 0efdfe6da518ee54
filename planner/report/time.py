"""Where the time of a step goes, and how long a training takes: in a line, in tables."""

from collections.abc import Iterable, Mapping

from planner.core.units import format_bytes, format_few, format_rate, format_seconds
from planner.report.page.contents import Cell, Number, Part, Table
from planner.throughput.result import Breakdown, Cost, Throughput

_HOUR = 3600  # seconds
LEFT_OUT = "without validation, compiling, and a loader that is slower than the step"
# What is less than this share of a step is not named in a line.
_LEAST_NAMED = 1 / 200


def bound_text(whose: str, seconds: Mapping[str, float]) -> str:
    """What a step waits for, in the words of every command."""
    return f"What limits {whose}, in shares of its time: {shares(seconds)}"


def shares(seconds: Mapping[str, float]) -> str:
    """`bandwidth 61%, matrix units 30%`: the parts of a step, the largest first."""
    total = sum(seconds.values())
    return ", ".join(
        f"{name} {part / total:.0%}"
        for name, part in ranked(seconds)
        if part >= total * _LEAST_NAMED
    )


def ranked(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])


def time_parts(step: Breakdown) -> list[Part]:
    """Seconds and share of each phase, then of each kind of operation with what limits it."""
    total = sum(step.phase_seconds.values())
    phases: list[list[Cell]] = [
        [name, *seconds_and_share(seconds, total)] for name, seconds in ranked(step.phase_seconds)
    ]
    kinds: list[list[Cell]] = [
        [name, *seconds_and_share(seconds, total), shares(step.bound_seconds_of(name))]
        for name, seconds in ranked(step.kind_seconds)
    ]
    return [
        Table(("phase", "time", "share"), phases),
        Table(("operation", "time", "share", "limited by"), kinds),
    ]


def time_facts(time: Throughput, unit: str, runs: bool = True) -> list[tuple[str, str]]:
    """Where a step's seconds and its rate lie, if it `runs`; what the card does for them, and what
    devices exchange."""
    low, high = 1 - time.uncertainty, 1 + time.uncertainty
    rate = time.images_per_second
    facts = [("Step", _between(time.step_seconds * low, time.step_seconds * high))]
    if runs:
        between = f"{format_rate(rate * low)} to {format_rate(rate * high)} {unit}/s"
        facts.append(("Rate of one device", between))
    if time.launches:
        facts.append(("Kernels", f"{time.launches:,} a step"))
    if time.peak_share is not None:
        share = f"{time.peak_share:.1%} of the card's FLOP/s in this precision"
        facts.append(("Matrix units", f"{time.matrix_flops / 1e12:,.3g} TFLOPs a step: {share}"))
    sent = time.communication
    if sent is not None:
        exposed = f"{format_seconds(sent.exposed_seconds)} are exposed: the device waits for them"
        facts += [
            ("Sent by each device", f"{format_bytes(sent.sent_bytes)} a step over {sent.link}"),
            ("Communication", f"{format_seconds(sent.seconds)}, of which {exposed}"),
            ("Without communication", f"{format_seconds(sent.alone_seconds)} a step"),
            ("By the link", _between(sent.low_seconds, sent.high_seconds)),
        ]
    elif time.devices > 1:
        facts.append(("Communication", "not counted: no link is named (--link)"))
    return facts


def seconds_and_share(seconds: float, total: float) -> list[Number]:
    return [Number(seconds, format_seconds(seconds)), Number(seconds, f"{seconds / total:.1%}")]


def _between(low: float, high: float) -> str:
    return f"{format_seconds(low)} to {format_seconds(high)}"


def hours_text(cost: Cost) -> str:
    """`4.1 h (3.0–6.3)`; `at least` where nobody knows how much it may be."""
    least = format_few(cost.low_seconds / _HOUR)
    high = cost.high_seconds
    ends = f"{least} at least" if high is None else f"{least}–{format_few(high / _HOUR)}"
    return f"{format_few(cost.seconds / _HOUR)} h ({ends})"


def hours_headers(costs: Iterable[Cost | None]) -> list[str]:
    """The column of a table whose rows have these."""
    return ["hours"] if any(costs) else []


def hours_cells(cost: Cost | None) -> list[str]:
    return [] if cost is None else [hours_text(cost)]


def training_text(cost: Cost) -> str:
    return f"{cost.epochs:g} epochs of {cost.images_per_epoch:,}"


def hours_notes(costs: Iterable[Cost | None], unit: str) -> list[str]:
    """What the column means."""
    return [
        f"Hours: {training_text(cost)} {unit}, by the predicted rate and its range, {LEFT_OUT}."
        for cost in filter(None, costs)
    ][:1]
