"""Gradients are summed in place as eager does: the trace beside real allocations on the CPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from planner.core.schema import TrainSetting  # noqa: E402
from planner.ledger.ledger import Allocated  # noqa: E402
from planner.trace.run import Trace, trace_training  # noqa: E402
from tests.trace.models import (  # noqa: E402
    TINY_IMAGES,
    Classifier,
)


def test_a_rewritten_view_gets_a_gradient_of_its_own() -> None:
    """An in-place ReLU on a view (up to torch 2.14 also on `linear`'s result): in eager, not in a
    dispatch mode, its gradient is copied into new zeros."""

    class Rewritten(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(4, 64)

        def forward(self, images: Tensor) -> Tensor:
            x = F.relu(self.wide(images).view(-1, 3, 4, 64), inplace=True)  # [B, 3, 4, 64]
            return self.head(x.mean(3).repeat(1, 1, 4).flatten(1))

    setting = TrainSetting(batch_size=512, precision="fp32", optimizer="sgd")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        Rewritten()(torch.randn(512, 3, 4, 4)).sum().backward()
    sizes = [e.nbytes() for e in profiler.profiler.kineto_results.events()]
    out, inside = (
        trace_training(Rewritten, TINY_IMAGES, setting, gradient_sums=sums)
        for sums in ("out_of_place", "in_place")
    )
    wide = 512 * 3 * 4 * 64 * 4

    def copies(trace: Trace) -> int:
        return sum(e.num_bytes == wide for e in trace.events if isinstance(e, Allocated))

    assert copies(inside) == 2 * sizes.count(wide) == copies(out) + 2  # one a step
