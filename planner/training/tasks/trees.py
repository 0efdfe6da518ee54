"""Batches as trees: tensors in any nesting of tuples, lists, dicts, mappings and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from planner.core.schema import TrainSetting


def map_tensors(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same tree with each tensor changed; what is no tensor and holds none stays as it is."""
    if isinstance(tree, Tensor):
        return change(tree)
    return rebuild(tree, lambda inner: map_tensors(inner, change))


def rebuild(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The same container with each of its values changed."""
    if isinstance(tree, tuple):
        values = [change(value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    if isinstance(tree, list):
        return [change(value) for value in tree]
    if isinstance(tree, Mapping):
        changed = {key: change(value) for key, value in tree.items()}
        if type(tree) is dict:
            return changed
        same: Any = copy.copy(tree)  # what transformers' collators return is a class of its own
        for key, value in changed.items():
            same[key] = value
        return same
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree) if f.init}
        return dataclasses.replace(tree, **{name: change(value) for name, value in fields.items()})
    return tree


def children(tree: Any) -> list[Any]:
    """The values of a container, in order; of anything else none."""
    found: list[Any] = []

    def note(value: Any) -> Any:
        found.append(value)
        return value

    if not isinstance(tree, Tensor):
        rebuild(tree, note)
    return found


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """Every tensor of `tree`, in order."""
    if isinstance(tree, Tensor):
        yield tree
    for inner in children(tree):
        yield from tensors_of(inner)


MAX_SHOWN = 4  # values of one container


def outline(tree: Any) -> str:
    """A batch by its shapes: `([2, 3, 8, 8] float32, {'label': [2] int64})`."""
    if isinstance(tree, Tensor):
        return f"{list(tree.shape)} {str(tree.dtype).removeprefix('torch.')}"
    if isinstance(tree, Mapping):
        shown = [f"{key!r}: {outline(value)}" for key, value in tree.items()]
        return f"{{{_some(shown)}}}"
    if isinstance(tree, tuple | list):
        values = _some(list(map(outline, tree)))
        return f"({values})" if isinstance(tree, tuple) else f"[{values}]"
    return type(tree).__name__


def _some(shown: list[str]) -> str:
    more = len(shown) - MAX_SHOWN
    return ", ".join([*shown[:MAX_SHOWN], *([f"and {more} more"] if more > 0 else [])])


def prepare(batch: Any, setting: TrainSetting, device: torch.device) -> Any:
    """A batch on its device as the setting trains it: floats in pure bf16, images channels last."""

    def prepared(tensor: Tensor) -> Tensor:
        tensor = tensor.to(device)
        if setting.precision == "pure-bf16" and tensor.is_floating_point():
            tensor = tensor.to(torch.bfloat16)
        return in_memory_format(tensor, setting)

    return map_tensors(batch, prepared)


def in_memory_format(tensor: Tensor, setting: TrainSetting) -> Tensor:
    """A float tensor of images [B, C, H, W] or clips [B, C, T, H, W] as the setting lays it out."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if setting.memory_format != "channels_last" or tensor.dim() not in formats:
        return tensor
    if not tensor.is_floating_point():
        return tensor
    return tensor.contiguous(memory_format=formats[tensor.dim()])
