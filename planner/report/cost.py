"""What a whole training takes and costs, in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from planner.core.units import format_few
from planner.throughput.cost import Cost

_HOUR = 3600  # seconds
LEFT_OUT = "without validation, compiling, and a loader that is slower than the step"


def cost_text(cost: Cost) -> str:
    """`4.1 h (3.0–6.3), which costs 82 (60–126) at 8 × 2.5 an hour`."""
    text = hours_text(cost)
    if cost.price_per_hour is not None:
        text += f", which costs {price_text(cost)} at {_hourly(cost)} an hour"
    return text


def hours_text(cost: Cost) -> str:
    high = None if cost.high_seconds is None else cost.high_seconds / _HOUR
    return _between(cost.seconds / _HOUR, cost.low_seconds / _HOUR, high, " h")


def price_text(cost: Cost) -> str:
    if cost.price is None or cost.low_price is None:
        return ""
    return _between(cost.price, cost.low_price, cost.high_price)


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


def _between(value: float, low: float, high: float | None, unit: str = "") -> str:
    """The value and its range; `at least` where nobody knows how much it may be."""
    least = format_few(low)
    ends = f"{least} at least" if high is None else f"{least}–{format_few(high)}"
    return f"{format_few(value)}{unit} ({ends})"
