"""The work of one window attention, counted on shapes: no torch, no device.

`attend` calls a block on shapes as `attention.py` beside this file calls the real one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from planner.ledger import Allocated, Computed, Event, Freed
from planner.libraries.maps import padding
from planner.libraries.registry import find_library
from planner.libraries.transformers.shapes import get_attn_mask
from planner.libraries.windows import crop, window_partition, window_reverse
from planner.schema.bench import BenchCase, Work
from planner.step.autocast import AutocastScope
from planner.step.engine import backward
from planner.step.frames import plain_calls
from planner.step.nn import Module, name_modules
from planner.step.tensor import Device, Parameter, Tensor, empty
from planner.step.views import contiguous, pad, roll, view
from planner.throughput.fusing import fuse_operations


@dataclass(frozen=True)
class Counted:
    """The work of both passes, and the most bytes alive above what was there before them."""

    forward: Work
    backward: Work
    peak_bytes: int


def count_work(case: BenchCase) -> Counted:
    """Of `case`; a compiled path's operations are those of the same attention, fused."""
    return _count(case.model_copy(update={"shape": ""}))


@cache
def _count(case: BenchCase) -> Counted:
    events, start, middle = _record(case)
    return Counted(
        _work("forward", events[start:middle], case.is_compiled),
        _work("backward", events[middle:], case.is_compiled),
        _growth(events, start),
    )


def _record(case: BenchCase) -> tuple[list[Event], int, int]:
    """The events of building, of the forward from an index on, and of the backward from another."""
    spec = find_library(case.library)
    setting = spec.resolve(case.model, case.setting.uncompiled())
    device = Device()
    with plain_calls():
        model = spec.on_shapes(case.model, setting)(device)
        name_modules(model)
        x = Parameter(device, (case.batch_size, *case.feature_map, case.channels))
        ahead = empty(device, x.shape, "float32", "gradient")
        start = len(device.events)
        with AutocastScope(device, setting.autocast_dtype):
            out = attend(case, model, x)
        middle = len(device.events)
        if out.dtype != ahead.dtype:
            ahead.dtype = out.dtype
        backward(out, ahead)
        events = list(device.events)
        del out, x, ahead, model
    return events, start, middle


def _work(phase: str, events: Iterable[Event], compiled: bool) -> Work:
    done = [(phase, event) for event in events if type(event) is Computed]
    if compiled:
        done, _ = fuse_operations(done, [""] * len(done))
    return Work(
        flops=sum(one.flops for _, one in done),
        moved_bytes=sum(one.num_bytes for _, one in done),
        operations=len(done),
    )


def _growth(events: list[Event], start: int) -> int:
    """The most that is alive of what came after `start`."""
    held: dict[int, int] = {}
    live = most = 0
    for event in events[start:]:
        if type(event) is Allocated:
            held[event.storage] = event.num_bytes
            live += event.num_bytes
            most = max(most, live)
        elif type(event) is Freed:
            live -= held.pop(event.storage, 0)
    return most


def attend(case: BenchCase, model: Module, x: Tensor) -> Tensor:
    """[B, H, W, C] to the same: the attention of the model's first block, or its shifted one."""
    names = find_library(case.library).block_classes
    blocks: list[Any] = [m for m in model.descendants() if type(m).__name__ in names]
    block, whole = blocks[case.shifted], model
    found: Tensor
    if case.library == "native":
        stage: Any = vars(whole)["layers"][0]
        found = block.attend(x, stage.grid)
    elif case.library == "timm":
        found = block.attend(x)
    elif case.library == "torchvision":
        found = block.attn(x)
    elif case.library == "transformers":
        found = _attend_transformers(block, x)
    else:
        found = _attend_microsoft(block, x)
    return found


def _attend_transformers(layer: Any, x: Tensor) -> Tensor:
    _, height, width, channels = x.shape
    side = layer.window_size
    x = pad(x, padding(height, side), padding(width, side))
    _, padded_height, padded_width, _ = x.shape
    mask = get_attn_mask(x, side, layer.shift_size)
    x = roll(x) if layer.shift_size > 0 else x
    windows = view(window_partition(x, (side, side)), -1, side * side, channels)
    windows = layer.attention(windows, mask)[0]
    windows = view(windows, -1, side, side, channels)
    x = window_reverse(windows, (side, side), padded_height, padded_width)
    x = roll(x) if layer.shift_size > 0 else x
    if (padded_height, padded_width) != (height, width):
        x = contiguous(crop(x, height, width))
    return x


def _attend_microsoft(block: Any, x: Tensor) -> Tensor:
    _, height, width, channels = x.shape
    side = block.window_size
    x = roll(x) if block.shift_size > 0 else x
    windows = view(window_partition(x, (side, side)), -1, side * side, channels)
    windows = block.attn(windows, block.attn_mask)
    windows = view(windows, -1, side, side, channels)
    x = window_reverse(windows, (side, side), height, width)
    return roll(x) if block.shift_size > 0 else x
