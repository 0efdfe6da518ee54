"""FSDP2 by trace: torch's `fully_shard` on fake tensors, held to closed forms and to real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import distributed  # noqa: E402

from planner.core.errors import PlannerError, UnsupportedError  # noqa: E402
from planner.core.schema import TrainSetting  # noqa: E402
from planner.ledger.ledger import (  # noqa: E402
    Allocated,
    Event,
    Marked,
    Sent,
)
from planner.trace.ledger import trace_estimate  # noqa: E402
from planner.trace.run import Trace, trace_training  # noqa: E402
from tests.trace.sharded_models import BLOCKS, IMAGES, WIDTH, Blocks  # noqa: E402

FSDP: dict[str, Any] = {
    "batch_size": 4, "precision": "fp32", "parallelism": "fsdp", "world_size": 8,
}  # fmt: skip
PARAMETERS = sum(p.numel() for p in Blocks().parameters())
# fc1's weight and bias have 256 rows, fc2's 64: eight devices share all of them evenly.
BLOCK = sum(p.numel() for p in Blocks().blocks[0].parameters())
HEAD_ROWS = 10  # of the head's weight and bias: 8 devices have up to 2 of them, 2 devices have 5


def trace_anew(rank: int = 0, width: int = WIDTH, **changes: Any) -> Trace:
    setting = TrainSetting.model_validate({**FSDP, **changes})
    return trace_training(lambda: Blocks(width), IMAGES, setting, detailed=True, rank=rank)


traced = cache(trace_anew)


def padded(num_devices: int) -> int:
    """Elements of all weights, with rows padded to a multiple of the devices."""
    rows = -(-HEAD_ROWS // num_devices) * num_devices - HEAD_ROWS
    evenly = [p for p in Blocks().parameters() if p.shape[0] != HEAD_ROWS]
    others = sum((-p.shape[0] % num_devices) * p[0].numel() for p in evenly)
    return PARAMETERS + rows * (WIDTH + 1) + others


def steady(trace: Trace) -> list[Event]:
    ends = [k for k, e in enumerate(trace.events) if isinstance(e, Marked)]
    last = [k for k in ends if trace.events[k] == Marked("zero_grad", 0)]
    return list(trace.events[last[0] + 1 :])


def sent(events: list[Event]) -> list[Sent]:
    return [event for event in events if isinstance(event, Sent)]


def test_what_a_step_sends_is_each_weight_gathered_twice_and_summed_once() -> None:
    num_devices = 8
    events = steady(traced(world_size=num_devices))
    whole = 4 * padded(num_devices)
    own = whole - 4 * BLOCKS * BLOCK  # embedding and head, which stay from forward to backward
    gathered = [e.num_bytes for e in sent(events) if e.collective == "all_gather"]
    summed = [e.num_bytes for e in sent(events) if e.collective == "reduce_scatter"]
    assert sum(gathered) == 2 * whole - own
    assert sum(summed) == whole
    assert len(gathered) == 2 * BLOCKS + 1
    assert len(summed) == BLOCKS + 1
    assert {e.group for e in sent(events)} == {"world"}
    # What comes out of the sums lies on their stream, and is the gradients.
    outputs = [e for e in events if isinstance(e, Allocated) and e.stream == "reduce_scatter"]
    assert sum(e.num_bytes for e in outputs) == whole // num_devices


@pytest.fixture
def own_group(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


def test_a_process_of_a_group_is_refused_and_keeps_it(own_group: None) -> None:
    with pytest.raises(UnsupportedError, match="belongs to one already"):
        trace_anew()
    assert distributed.is_initialized()


def test_no_group_is_left_behind() -> None:
    class Fails(Blocks):
        def forward(self, images: Any) -> Any:
            return super().forward(images)[:, 999:].view(3, 7)

    with pytest.raises(PlannerError):
        trace_estimate(IMAGES, TrainSetting.model_validate(FSDP), Fails)
    assert not distributed.is_initialized()
    trace_anew()
    assert not distributed.is_initialized()
