"""Two traced steps: derived sizes, steadiness, and what a trace leaves behind.

Legend: B batch; sizes in bytes, each request rounded to 512.
"""

from __future__ import annotations

import gc
import signal
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor  # noqa: E402

from planner.core.schema import TrainSetting  # noqa: E402
from planner.ledger.ledger import Freed, Marked, Tagged  # noqa: E402
from planner.trace.run import (  # noqa: E402
    in_steady_order,
    trace_training,
)
from tests.equality import phase_ends  # noqa: E402
from tests.trace.models import (  # noqa: E402
    SMALL,
    TINY_IMAGES,
    Classifier,
    swin_timm,
)


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "fp16", "optimizer": "adamw-fused", "clip_grad": True},
        {"amsgrad": True, "accumulate": 2, "zero_grad_to_none": False},
    ],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_every_way_to_step_is_steady(fields: dict[str, object]) -> None:
    """From the second step on, a step ends with what it began with."""
    setting = TrainSetting(batch_size=2, **fields)
    trace = trace_training(Classifier, TINY_IMAGES, setting, num_steps=3)
    second, third = (
        [(phase, *sizes) for phase, step, *sizes in phase_ends(trace.events) if step == number]
        for number in (1, 2)
    )
    assert second == third


def test_reference_counts_free_everything() -> None:
    """The collector is off in a trace, so a cycle would leave fake tensors behind."""
    setting = TrainSetting(batch_size=2, precision="bf16")
    gc.collect()
    gc.disable()
    try:
        before = [o for o in gc.get_objects() if type(o) in (FakeTensor, nn.Parameter)]
        trace = trace_training(Classifier, TINY_IMAGES, setting)
        after = [o for o in gc.get_objects() if type(o) in (FakeTensor, nn.Parameter)]
    finally:
        gc.enable()
    assert len(after) == len(before)
    assert trace.events


def test_an_interrupt_ends_a_trace_wherever_it_comes() -> None:
    """Also where Python swallows what is raised: as a tensor dies."""

    class Interrupted(Classifier):
        def forward(self, x: Any) -> Any:
            dies = x + 1
            weakref.finalize(dies, signal.raise_signal, signal.SIGINT)
            del dies
            return super().forward(x)

    with pytest.raises(KeyboardInterrupt):
        trace_training(Interrupted, TINY_IMAGES, TrainSetting(batch_size=2))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_tied_weight_is_counted_once() -> None:
    class Tied(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.same = self.head
            self.also = nn.Linear(48, 10)
            self.also.weight = self.head.weight

    setting = TrainSetting(batch_size=1, precision="fp32", optimizer="sgd")
    trace = trace_training(Tied, TINY_IMAGES, setting, num_steps=1)
    assert trace.num_parameters == 48 * 10 + 2 * 10


def test_two_recordings_are_equal() -> None:
    """Autocast empties its cache in the order of addresses, and checkpointing tags so."""

    def build() -> nn.Module:
        module = swin_timm(1)
        module.set_grad_checkpointing()
        return module

    setting = TrainSetting(batch_size=2, precision="bf16")
    first, second = (
        trace_training(build, SMALL, setting, gradient_sums="in_place", detailed=True)
        for _ in range(2)
    )
    assert first.events == second.events


def test_runs_of_releases_and_of_tags_are_in_the_order_of_storages() -> None:
    tags = [Tagged(4, "activations"), Tagged(3, "gradients"), Tagged(3, "activations")]
    events = [Freed(2), Freed(1), Marked("forward", 0), Freed(0), *tags]
    assert list(in_steady_order(events)) == [
        Freed(1), Freed(2), Marked("forward", 0), Freed(0), *tags[1:], tags[0],
    ]  # fmt: skip
