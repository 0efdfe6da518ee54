"""Answers in full, as a terminal prints them under --detail."""

from collections.abc import Sequence

from planner import Advice
from planner.core.schema.record import Recommendation
from planner.estimation.estimate import Estimate
from planner.estimation.scaling import Scaled
from planner.report.advice import advice_answer
from planner.report.estimates import estimate_answer, rows_answer
from planner.report.searches import recommendation_answer
from planner.report.text import parts_text
from search.runs import interval_of


def advice_text(found: Advice) -> str:
    return parts_text(advice_answer(found), detail=True)


def estimate_text(found: Estimate) -> str:
    return parts_text(estimate_answer(found, lambda _: ""), detail=True)


def rows_text(found: Sequence[Estimate], scaled: Sequence[Scaled] = ()) -> str:
    return parts_text(rows_answer(found, lambda _: "", scaled=scaled), detail=True)


def recommendation_text(found: Recommendation) -> str:
    return parts_text(recommendation_answer(found, interval_of), detail=True)
