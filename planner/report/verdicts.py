"""Whether an estimate fits, in one word and by how much: the same words on terminal and page."""

from __future__ import annotations

from planner.core.units import format_bytes
from planner.estimation.estimate import Estimate
from planner.report.page.contents import Verdict, VerdictKind

_CELLS: dict[VerdictKind, str] = {
    "fits": "yes", "likely": "probably", "unlikely": "probably not", "no": "no", "unknown": "",
}  # fmt: skip


def verdict_of(estimate: Estimate) -> Verdict:
    """The word, and what it rests on: `0.7 GiB free, but the estimate may be 1.3 GiB low`."""
    return Verdict(_kind(estimate), _why(estimate))


def verdict_text(estimate: Estimate) -> str:
    """The same as one sentence: `Fits: 1.2 GiB of 2 GiB are free, 1 GiB in the worst case.`"""
    found = verdict_of(estimate)
    return f"{found.word}: {found.text[0].lower()}{found.text[1:]}"


def fits_cell(estimate: Estimate) -> str:
    """The same as a word below `fits`; empty where no memory was named."""
    return _CELLS[_kind(estimate)]


def is_shown_as_running(estimate: Estimate) -> bool:
    """Whether a rate may stand for it: what does not fit does not run."""
    return estimate.fits is not False


def _kind(estimate: Estimate) -> VerdictKind:
    if estimate.fits is None or estimate.budget_bytes is None:
        return "unknown"
    if estimate.fits:
        return "fits" if estimate.fits_surely else "likely"
    return "unlikely" if estimate.low_bytes <= estimate.budget_bytes else "no"


def _why(estimate: Estimate) -> str:
    budget = estimate.budget_bytes
    if estimate.fits is None or budget is None:
        return "No memory was named. Pass --gpu NAME or --memory SIZE."
    spare = budget - estimate.device_total_bytes
    more = format_bytes(estimate.high_bytes - estimate.device_total_bytes)
    less = format_bytes(estimate.device_total_bytes - estimate.low_bytes)
    free, of = format_bytes(abs(spare)), f"of {format_bytes(budget)}"
    if estimate.fits and estimate.fits_surely:
        worst = format_bytes(budget - estimate.high_bytes)
        return f"{free} {of} are free, {worst} in the worst case."
    if estimate.num_alloc_retries:
        return "Only by freeing cached memory in every step, which is slower."
    if estimate.fits:
        return f"{free} {of} are free, but the estimate may be {more} low."
    if spare >= 0:
        return f"Only {free} {of} would be free."
    needs = f"It needs {free} more than the {format_bytes(budget)} available"
    if estimate.low_bytes <= budget:
        return f"{needs}, but the estimate may be {less} high."
    return f"{needs}."
