"""The authors' own Swin v1 and v2 on shapes are the real modules, event by event.

The real modules need a checkout: their recorded phase ends and peaks stand for them
(`microsoft_cases`). Shown with torch 2.13.0 and commit f82860b.
"""

from __future__ import annotations

import pytest

from planner.step.training import record_training
from tests.building import on_shapes
from tests.libraries.microsoft_cases import (
    PUBLISHED_CASES,
    SMALL_CASES,
    Case,
    facts_of,
    read_facts,
)


@pytest.fixture(scope="module")
def facts() -> dict[str, object]:
    return read_facts()


@pytest.mark.parametrize(
    "cases",
    [SMALL_CASES, pytest.param(PUBLISHED_CASES, marks=pytest.mark.release)],
    ids=["small", "published"],
)
def test_recorded_facts(
    cases: tuple[Case, ...], facts: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.step.pointwise.torch_version", lambda: (2, 13))  # of the facts
    for case in cases:
        config, setting = case.config, case.train_setting
        build = on_shapes(config, setting)
        ledger = record_training(build, config, setting, in_place_sums=False)
        assert facts_of(ledger.events, ledger.num_parameters) == facts[case.title], case.title


def test_no_fact_is_left_unused(facts: dict[str, object]) -> None:
    assert {case.title for case in (*SMALL_CASES, *PUBLISHED_CASES)} == set(facts)
