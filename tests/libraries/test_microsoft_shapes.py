"""The authors' own Swin v1 and v2 on shapes are the real modules, event by event.

The real modules need a checkout (SWIN_TRANSFORMER_CHECKOUT); without one, their recorded phase ends
and peaks stand for them (`microsoft_cases`). Shown with torch 2.13.0 and commit f82860b.
"""

from __future__ import annotations

from unittest import mock

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
from tests.libraries.steps import (
    Changes,
    assert_equal_to_cpu,
    assert_equal_to_trace,
    needs,
    needs_checkout,
)


@pytest.fixture(scope="module")
def facts() -> dict[str, object]:
    return read_facts()


@pytest.mark.parametrize(
    "case",
    [*SMALL_CASES, *(pytest.param(c, marks=pytest.mark.release) for c in PUBLISHED_CASES)],
    ids=lambda case: case.title,
)
def test_recorded_facts(
    case: Case, facts: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.step.pointwise.torch_version", lambda: (2, 13))  # of the facts
    config, setting = case.config, case.train_setting
    build = on_shapes(config, setting)
    ledger = record_training(build, config, setting, in_place_sums=False)
    assert facts_of(ledger.events, ledger.num_parameters) == facts[case.title]


def test_no_fact_is_left_unused(facts: dict[str, object]) -> None:
    assert {case.title for case in (*SMALL_CASES, *PUBLISHED_CASES)} == set(facts)


@needs_checkout
@needs("torch", "timm")
@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.title)
def test_real_module(case: Case) -> None:
    assert_equal_to_trace(case.config, case.train_setting)


# The profiler's events leave out what has 8 bytes or less, so nothing here has; but they count the
# logarithm of a Python number, which version 2 takes on the host in every forward.
@needs_checkout
@needs("torch", "timm")
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("model", "setting"),
    [
        ({}, {}),
        ({"image_size": (56, 112)}, {"accumulate": 2}),
        ({"drop_path_rate": 0.0}, {"batch_size": 1}),
        ({"image_size": (112, 56)}, {"checkpointing": "blocks"}),
        ({"image_size": (56, 112)}, {"checkpointing": "stages"}),
        ({"patch_norm": False, "absolute_position_embedding": True}, {}),
    ],
)
def test_real_tensors(version: int, model: Changes, setting: Changes) -> None:
    import torch

    sizes = {"version": version, "num_heads": (3, 6), "embed_dim": 48}
    case = Case({**sizes, **model}, {"precision": "fp32", "batch_size": 3, **setting})
    limit = torch.tensor(4.6)
    with mock.patch.object(torch, "log", lambda x: x if x.dim() else limit):
        assert_equal_to_cpu(case.config, case.train_setting)


@pytest.mark.release
@needs_checkout
@needs("torch", "timm")
@pytest.mark.parametrize("case", PUBLISHED_CASES, ids=lambda case: case.title)
def test_published_models(case: Case) -> None:
    assert_equal_to_trace(case.config, case.train_setting)
