"""Where the time of a step goes, and what a training takes and costs: in a line, in tables."""

from collections.abc import Iterable, Mapping, Sequence

from planner.core.units import format_bytes, format_few, format_rate, format_seconds
from planner.report.page.contents import Cell, Number, Part, Table
from planner.throughput.result import Accounts, Cost, Throughput

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


def time_parts(step: Accounts) -> list[Part]:
    """Seconds and share of each phase, then of each kind of operation with what limits it."""
    total = sum(step.phase_seconds.values())
    phases: list[list[Cell]] = [
        [name, *seconds_and_share(seconds, total)] for name, seconds in ranked(step.phase_seconds)
    ]
    kinds: list[list[Cell]] = [
        [name, *seconds_and_share(seconds, total), shares(step.bounds_of(name))]
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


def cost_text(cost: Cost) -> str:
    """`4.1 h (3.0–6.3), which costs 82 (60–126) at 8 × 2.5 an hour`."""
    text = hours_text(cost)
    if cost.price_per_hour is not None:
        text += f", which costs {price_text(cost)} at {_hourly(cost)} an hour"
    return text


def hours_text(cost: Cost) -> str:
    high = None if cost.high_seconds is None else cost.high_seconds / _HOUR
    return _range(cost.seconds / _HOUR, cost.low_seconds / _HOUR, high, " h")


def price_text(cost: Cost) -> str:
    if cost.price is None or cost.low_price is None:
        return ""
    return _range(cost.price, cost.low_price, cost.high_price)


def cost_headers(costs: Sequence[Cost | None]) -> list[str]:
    """The columns of a table whose rows have these."""
    known = [cost for cost in costs if cost is not None]
    priced = [cost for cost in known if cost.price_per_hour is not None]
    return [*(["hours"] if known else []), *(["price"] if priced else [])]


def cost_cells(cost: Cost | None) -> list[str]:
    if cost is None:
        return []
    return [hours_text(cost), *([price_text(cost)] if cost.price_per_hour is not None else [])]


def training_text(cost: Cost) -> str:
    return f"{cost.epochs:g} epochs of {cost.images_per_epoch:,}"


def cost_notes(costs: Iterable[Cost | None], unit: str) -> list[str]:
    """What the columns of a table mean: hours, and a price."""
    one = next((cost for cost in costs if cost is not None), None)
    if one is None:
        return []
    text = f"Hours: {training_text(one)} {unit}, by the predicted rate and its range, {LEFT_OUT}"
    if one.price_per_hour is not None:
        text += f". Price: {one.price_per_hour:g} an hour for each GPU"
    return [f"{text}."]


def _hourly(cost: Cost) -> str:
    several = f"{cost.devices} × " if cost.devices > 1 else ""
    return f"{several}{cost.price_per_hour:g}"


def _range(value: float, low: float, high: float | None, unit: str = "") -> str:
    """The value and its range; `at least` where nobody knows how much it may be."""
    least = format_few(low)
    ends = f"{least} at least" if high is None else f"{least}–{format_few(high)}"
    return f"{format_few(value)}{unit} ({ends})"
