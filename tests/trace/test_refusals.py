"""What a trace cannot follow, in our words and with the line of the user's code."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from planner.errors import PlannerError, UnsupportedError  # noqa: E402
from planner.schema import TrainSetting  # noqa: E402
from planner.trace import trace_estimate  # noqa: E402
from tests.trace.models import (  # noqa: E402
    TINY_IMAGES,
    Classifier,
)


def test_a_model_that_reads_values_is_told_so() -> None:
    class Reads(Classifier):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images) * images.mean().item()

    with pytest.raises(UnsupportedError, match="_local_scalar_dense"):
        trace_estimate(TINY_IMAGES, TrainSetting(batch_size=2), Reads)


def test_a_model_that_breaks_names_the_operation() -> None:
    class Breaks(Classifier):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images[images > 0])

    with pytest.raises(PlannerError, match=r"aten\.(nonzero|index)\.\w+ broke on fake tensors"):
        trace_estimate(TINY_IMAGES, TrainSetting(batch_size=2), Breaks)


def test_a_model_that_raises_says_where() -> None:
    class Raises(Classifier):
        def forward(self, images: Tensor) -> Tensor:
            raise ValueError("no such stage")

    with pytest.raises(PlannerError, match=r"ValueError .*test_refusals\.py:\d+: no such stage"):
        trace_estimate(TINY_IMAGES, TrainSetting(batch_size=2), Raises)


def test_what_a_trace_does_not_follow_is_refused() -> None:
    setting = TrainSetting(parallelism="ddp", checkpointing="blocks")
    with pytest.raises(UnsupportedError, match="one device") as refused:
        trace_estimate(TINY_IMAGES, setting, Classifier)
    assert "checkpointing" in str(refused.value)
