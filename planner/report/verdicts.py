"""Whether an estimate fits, and what it needs of what there is: the same words on terminal and
page."""

from __future__ import annotations

from planner.core.units import format_bytes, format_range
from planner.estimation.estimate import Estimate
from planner.report.page.contents import Verdict, VerdictKind

NOT_TRACED = "not traced"
NARROWER = "Compile is not traced: --trace narrows the range, in one to three minutes."


def verdict_of(estimate: Estimate) -> Verdict:
    """The word, and what it rests on: `Needs 5.00 GiB (4.73–5.27 GiB) of 23.52 GiB.`"""
    return Verdict(_kind(estimate), _why(estimate))


def verdict_text(estimate: Estimate, when: str = "") -> str:
    """The same as one sentence: `Fits: needs 5.00 GiB (4.73–5.27 GiB) of 23.52 GiB.`"""
    found = verdict_of(estimate)
    return f"{found.word}{when}: {found.text[0].lower()}{found.text[1:]}"


def is_shown_as_running(estimate: Estimate) -> bool:
    """Whether a rate may stand for it: what does not fit does not run."""
    return estimate.fits is not False


def total_text(estimate: Estimate) -> str:
    """The device total; of a compiled step that was not traced between what it is expected."""
    if estimate.as_eager:
        return between_text(estimate)
    return format_bytes(estimate.device_total_bytes)


def between_text(estimate: Estimate) -> str:
    return format_range(estimate.low_bytes, estimate.high_bytes)


def needs_text(estimate: Estimate) -> str:
    """`5.00 GiB (4.73–5.27 GiB)`"""
    total, between = total_text(estimate), between_text(estimate)
    return total if total == between else f"{total} ({between})"


def _kind(estimate: Estimate) -> VerdictKind:
    if estimate.fits is None or estimate.budget_bytes is None:
        return "unknown"
    if estimate.fits:
        return "fits" if estimate.fits_surely else "likely"
    return "unlikely" if estimate.low_bytes <= estimate.budget_bytes else "no"


def _why(estimate: Estimate) -> str:
    needs, budget = f"Needs {needs_text(estimate)}", estimate.budget_bytes
    if budget is None:
        text = f"{needs}. No memory was named: pass --gpu NAME or --memory SIZE"
    else:
        text = f"{needs} of {format_bytes(budget)}"
        if estimate.num_alloc_retries:
            text += ", only by freeing cached memory, which is slower"
    return f"{text}."
