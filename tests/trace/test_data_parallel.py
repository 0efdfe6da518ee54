"""DistributedDataParallel of any model, traced: what torch refuses of it, the trace refuses too."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from planner.core.errors import UnsupportedError  # noqa: E402
from planner.core.schema import TrainSetting  # noqa: E402
from planner.ledger.ledger import Allocated, Awaited, Ledger, Sent  # noqa: E402
from planner.step.reducer import BUCKET_LABEL  # noqa: E402
from planner.trace.ledger import trace_estimate  # noqa: E402
from planner.training.parallel.data_parallel import DataParallel  # noqa: E402
from tests.trace.models import TINY_IMAGES  # noqa: E402


class Spare(nn.Module):
    """A classifier with a layer that it may not use, and one that it may checkpoint."""

    def __init__(self, has_spare: bool = False, reentrant: bool = False) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 10)
        self.never = nn.Linear(7, 3) if has_spare else None
        self.reentrant = reentrant

    def forward(self, images: Tensor) -> Any:
        x = self.patch(images).mean((2, 3))
        x = checkpoint(self.inner, x, use_reentrant=True) if self.reentrant else self.inner(x)
        return self.head(x)


def traced(*kind: bool, **changes: object) -> Ledger:
    base = {"batch_size": 2, "precision": "fp32", "parallelism": "ddp", **changes}
    return trace_estimate(TINY_IMAGES, TrainSetting.model_validate(base), partial(Spare, *kind))


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


def test_one_bucket_crosses_and_is_awaited() -> None:
    ledger = traced()
    sent = [e for e in ledger.events if isinstance(e, Sent)]
    buckets = [e for e in ledger.events if isinstance(e, Allocated) and e.label == BUCKET_LABEL]
    assert [e.num_bytes for e in buckets] == [4 * ledger.num_parameters] * 2  # made and rebuilt
    reduced = [e for e in sent if e.collective == "all_reduce"]
    assert [e.num_bytes for e in reduced] == [4 * ledger.num_parameters] * 3
    awaited = [e.handle for e in ledger.events if isinstance(e, Awaited)]
    assert sorted(awaited) == [e.handle for e in sent]
    assert any("DistributedDataParallel: one gradient bucket" in note for note in ledger.notes)


@pytest.mark.parametrize("changes", [{}, {"ddp_bucket_view": True}])
def test_a_parameter_without_a_gradient_ends_the_second_forward(
    group: None, changes: dict[str, object]
) -> None:
    with pytest.raises(UnsupportedError, match=r"^never\.weight, never\.bias get no") as refused:
        traced(True, **changes)
    assert "ddp_find_unused=true" in str(refused.value)
    with pytest.raises(RuntimeError, match="not used in producing loss"):
        step_twice(DistributedDataParallel(Spare(True)))


@pytest.mark.parametrize("mode", ["ddp_find_unused", "ddp_static_graph"])
def test_unused_parameters_cross_as_zeros_where_ddp_looks_for_them(group: None, mode: str) -> None:
    ledger = traced(True, **{mode: True})
    reduced = [e for e in ledger.events if isinstance(e, Sent) and e.dtype == "float32"]
    of_all = [e.num_bytes for e in reduced if e.collective == "all_reduce"]
    is_static = mode == "ddp_static_graph"
    assert of_all == [4 * ledger.num_parameters] * (4 if is_static else 2)
    step_twice(DistributedDataParallel(Spare(True), None, find_unused_parameters=not is_static,
                                       static_graph=is_static))  # fmt: skip


def test_parameters_within_reentrant_checkpointing_are_no_unused_ones(group: None) -> None:
    with pytest.raises(UnsupportedError, match=r"inner\.(weight|bias) comes after") as refused:
        traced(False, True, ddp_find_unused=True)
    assert "ddp_static_graph=true" in str(refused.value)
    module = DistributedDataParallel(Spare(False, True), find_unused_parameters=True)
    with pytest.raises(RuntimeError, match="ready only once"):
        step_twice(module)
    traced(False, True)
    traced(False, True, ddp_static_graph=True)
    step_twice(DistributedDataParallel(Spare(False, True), static_graph=True))
