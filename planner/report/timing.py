"""Where a step's time goes, and how long a training takes: as sentences, facts and tables."""

from collections.abc import Iterable, Mapping

from planner.core.units import format_bytes, format_few, format_rate, format_seconds
from planner.report.page.contents import Cell, Number, Part, Table
from planner.throughput.result import Breakdown, Cost, Throughput

_HOUR = 3600  # seconds
LEFT_OUT = "without validation, compiling, and a loader that is slower than the step"
_LEAST_NAMED = 1 / 200  # of a step: a sentence does not name a smaller share


def bound_text(whose: str, seconds: Mapping[str, float]) -> str:
    """`What limits the step, in shares of its time: bandwidth 61%, …`"""
    return f"What limits {whose}, in shares of its time: {shares_text(seconds)}"


def shares_text(seconds: Mapping[str, float]) -> str:
    """`bandwidth 61%, matrix units 30%`: the parts of a step, the largest first."""
    total = sum(seconds.values())
    return ", ".join(
        f"{name} {part / total:.0%}"
        for name, part in largest_first(seconds)
        if part >= total * _LEAST_NAMED
    )


def largest_first(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])


def time_parts(step: Breakdown) -> list[Part]:
    """A table of the phases, and one of the kinds of operation with what limits each."""
    total = sum(step.phase_seconds.values())
    phases: list[list[Cell]] = [
        [name, *seconds_and_share(part, total)] for name, part in largest_first(step.phase_seconds)
    ]
    kinds: list[list[Cell]] = [
        [name, *seconds_and_share(part, total), shares_text(step.bound_seconds_of(name))]
        for name, part in largest_first(step.kind_seconds)
    ]
    return [
        Table(("phase", "time", "share"), phases),
        Table(("operation", "time", "share", "limited by"), kinds),
    ]


def time_facts(time: Throughput, unit: str, is_running: bool = True) -> list[tuple[str, str]]:
    """The ranges of a step's seconds and, if it `is_running`, of its rate; its kernels and its use
    of the matrix units; and what the devices exchange."""
    low, high = 1 - time.uncertainty, 1 + time.uncertainty
    rate = time.images_per_second
    facts = [("Step", _seconds_range(time.step_seconds * low, time.step_seconds * high))]
    if is_running:
        rate_range = f"{format_rate(rate * low)} to {format_rate(rate * high)} {unit}/s"
        facts.append(("Rate of one device", rate_range))
    if time.launches:
        facts.append(("Kernels", f"{time.launches:,} a step"))
    if time.peak_share is not None:
        share = f"{time.peak_share:.1%} of the card's FLOP/s in this precision"
        facts.append(("Matrix units", f"{time.matrix_flops / 1e12:,.3g} TFLOPs a step: {share}"))
    exchange = time.communication
    if exchange is not None:
        exposed = f"of which {format_seconds(exchange.exposed_seconds)} are exposed"
        sent = f"{format_bytes(exchange.sent_bytes)} a step over {exchange.link}"
        text = f"{format_seconds(exchange.seconds)}, {exposed}: the device waits for them"
        facts += [
            ("Sent by each device", sent),
            ("Communication", text),
            ("Without communication", f"{format_seconds(exchange.alone_seconds)} a step"),
            ("By the link", _seconds_range(exchange.low_seconds, exchange.high_seconds)),
        ]
    elif time.devices > 1:
        facts.append(("Communication", "not counted: no link is named (--link)"))
    return facts


def seconds_and_share(seconds: float, total: float) -> list[Number]:
    return [Number(seconds, format_seconds(seconds)), Number(seconds, f"{seconds / total:.1%}")]


def _seconds_range(low: float, high: float) -> str:
    return f"{format_seconds(low)} to {format_seconds(high)}"


def hours_text(cost: Cost) -> str:
    """`4.1 h (3.0–6.3)`; `at least` where the upper end is unknown."""
    low = format_few(cost.low_seconds / _HOUR)
    high = cost.high_seconds
    hours_range = f"{low} at least" if high is None else f"{low}–{format_few(high / _HOUR)}"
    return f"{format_few(cost.seconds / _HOUR)} h ({hours_range})"


def hours_headers(costs: Iterable[Cost | None]) -> list[str]:
    """The header of the column of hours, if any row has a cost."""
    return ["hours"] if any(costs) else []


def hours_cells(cost: Cost | None) -> list[str]:
    return [] if cost is None else [hours_text(cost)]


def training_text(cost: Cost) -> str:
    return f"{cost.epochs:g} epochs of {cost.images_per_epoch:,}"


def hours_notes(costs: Iterable[Cost | None], unit: str) -> list[str]:
    """A line that explains the column of hours."""
    return [
        f"Hours: {training_text(cost)} {unit}, by the predicted rate and its range, {LEFT_OUT}."
        for cost in filter(None, costs)
    ][:1]
