"""A ledger is the same whatever evaluates Python's frames around it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from planner.core.schema import SwinConfig, TrainSetting
from planner.ledger.ledger import Ledger
from planner.step.tensor import _callers_keep_arguments, plain_calls
from planner.step.training import record_training
from tests.building import on_shapes

TINY = SwinConfig(
    library="timm", image_size=(56, 56), depths=(2, 2), num_heads=(1, 2), embed_dim=32
)


def recorded() -> Ledger:
    setting = TrainSetting(batch_size=3, attention="eager")
    return record_training(on_shapes(TINY, setting), TINY, setting)


@pytest.fixture
def dynamo() -> Iterator[None]:
    """torch.compile's evaluator, as a thread that ended within a compiled call leaves it behind."""
    import torch._dynamo.eval_frame as dynamo

    before = dynamo.set_eval_frame(False)
    yield
    dynamo.set_eval_frame(before)


def test_compiling_elsewhere_changes_no_ledger(request: pytest.FixtureRequest) -> None:
    alone = recorded()
    request.getfixturevalue("dynamo")
    assert _callers_keep_arguments()
    assert recorded() == alone


@pytest.mark.usefixtures("dynamo")
def test_the_evaluator_is_put_back() -> None:
    with plain_calls():
        assert not _callers_keep_arguments()
    assert _callers_keep_arguments()
