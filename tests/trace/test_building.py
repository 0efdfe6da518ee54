"""A module is built without filling its large weights."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from planner.core.schema import FactoryModel, TrainSetting  # noqa: E402
from planner.trace.building import build_task  # noqa: E402
from planner.trace.run import trace_training  # noqa: E402
from tests.trace.models import (  # noqa: E402
    TINY_IMAGES,
    Classifier,
)

WIDTH = 384  # 576 KiB: memory that has just been freed is given out again as it is


@pytest.mark.timeout(120)
def test_initialisers_that_draw_until_values_fit_come_to_an_end() -> None:
    """`trunc_normal_` looks at values, and large weights have whatever was in memory."""

    def build() -> nn.Module:
        layer = nn.Linear(WIDTH, WIDTH)
        nn.init.trunc_normal_(layer.weight, std=0.02)
        return layer

    for _ in range(5):
        junk = [torch.full((WIDTH, WIDTH), 9.0) for _ in range(40)]
        kept = junk[::2]
        del junk
        build_task(build, FactoryModel(factory="a:b"), TrainSetting())
        del kept


def test_building_leaves_large_weights_unwritten() -> None:
    """A weight of 16 GiB is built at once: nobody writes its pages."""

    class Wide(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(1 << 16, 1 << 16)

    setting = TrainSetting(batch_size=1, precision="fp32", optimizer="sgd")
    trace = trace_training(Wide, TINY_IMAGES, setting, num_steps=1)
    assert trace.num_parameters > 1 << 32
