"""DistributedDataParallel of any model, traced: what torch refuses of it, the trace refuses too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from planner.core.errors import UnsupportedError  # noqa: E402
from planner.core.schema import TrainSetting  # noqa: E402
from planner.trace.ledger import trace_estimate  # noqa: E402
from planner.training.parallel.data_parallel import DataParallel  # noqa: E402
from tests.trace.models import TINY_IMAGES  # noqa: E402


class Spare(nn.Module):
    """A classifier with a layer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 10)
        self.never = nn.Linear(7, 3)

    def forward(self, images: Tensor) -> Any:
        return self.head(self.inner(self.patch(images).mean((2, 3))))


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def step_twice(module: nn.Module) -> None:
    for _ in range(2):
        module(torch.randn(2, 3, 8, 8)).sum().backward()


@pytest.mark.parametrize("sent", [True, False])
@pytest.mark.filterwarnings("error")
def test_buffers_are_sent_or_not_without_a_warning(group: None, sent: bool) -> None:
    """torch 2.13 deprecates the option, and what replaces it sends them once in any case."""
    setting = TrainSetting(parallelism="ddp", world_size=2, ddp_broadcast_buffers=sent)
    wrapped = DataParallel(Spare(), setting, torch.device("cpu"))
    assert wrapped.module.broadcast_buffers is sent


def test_a_parameter_without_a_gradient_ends_the_second_forward(group: None) -> None:
    setting = TrainSetting(batch_size=2, precision="fp32", parallelism="ddp")
    with pytest.raises(UnsupportedError, match=r"^never\.weight, never\.bias get no") as refused:
        trace_estimate(TINY_IMAGES, setting, Spare)
    assert "ddp_find_unused=true" in str(refused.value)
    with pytest.raises(RuntimeError, match="not used in producing loss"):
        step_twice(DistributedDataParallel(Spare()))
