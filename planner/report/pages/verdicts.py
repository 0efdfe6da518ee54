"""Whether an estimate fits, in one word and by how much: the page's own sentences."""

from __future__ import annotations

from planner.core.units import format_bytes
from planner.estimation.estimate import Estimate
from planner.report.page.contents import Verdict, VerdictKind
from planner.report.tables import fits_word

_KINDS: dict[str, VerdictKind] = {
    "yes": "fits", "likely": "likely", "unlikely": "unlikely", "no": "no", "": "unknown",
}  # fmt: skip


def verdict_of(estimate: Estimate) -> Verdict:
    """The word, and what it rests on: `0.7 GiB free, but the estimate may be 1.3 GiB low`."""
    return Verdict(_KINDS[fits_word(estimate)], _why(estimate))


def verdict_text(estimate: Estimate) -> str:
    """The same as one sentence: `Fits: 1.2 GiB of 23.52 GiB are free.`"""
    found = verdict_of(estimate)
    return f"{found.word}: {found.text[0].lower()}{found.text[1:]}"


def is_shown_as_running(estimate: Estimate) -> bool:
    """Whether a rate may stand for it: what does not fit does not run."""
    return estimate.fits is not False


def _why(estimate: Estimate) -> str:
    budget, spare = estimate.budget_bytes, estimate.headroom_bytes
    if estimate.fits is None or budget is None or spare is None:
        return "No memory was named. Pass --gpu NAME or --memory SIZE."
    more = format_bytes(estimate.high_bytes - estimate.device_total_bytes)
    less = format_bytes(estimate.device_total_bytes - estimate.low_bytes)
    free, of = format_bytes(abs(spare)), f"of {format_bytes(budget)}"
    if estimate.fits and estimate.fits_surely:
        return f"{free} {of} free, even in the worst case {format_bytes(_worst(estimate))}."
    if estimate.num_alloc_retries:
        return "Only by freeing cached memory in every step, which is slower."
    if estimate.fits:
        return f"{free} {of} free, but the estimate may be {more} low."
    if spare >= 0:
        return f"Only {free} {of} would be free."
    needs = f"It needs {free} more than the {format_bytes(budget)} there are"
    if estimate.low_bytes <= budget:
        return f"{needs}, but the estimate may be {less} high."
    return f"{needs}."


def _worst(estimate: Estimate) -> int:
    assert estimate.budget_bytes is not None, "asked for"
    return estimate.budget_bytes - estimate.high_bytes
