"""Autocast as CUDA has it (aten/src/ATen/autocast_mode.h): what is cast, and the cache of casts."""

from __future__ import annotations

from planner.step.pointwise import to_dtype
from planner.step.tensor import Device, Parameter, Tensor

_ELIGIBLE = frozenset({"float32", "bfloat16", "float16"})


class Autocast:
    """The low-precision dtype, and the casts of fp32 leaves made so far inside the context."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.casts: dict[int, tuple[Parameter, Tensor]] = {}


class AutocastScope:
    """`torch.autocast("cuda", dtype)`, or nothing for None. The casts are dropped at its end.

    An inner scope shares the outer's cache: PyTorch clears it only when the outermost one ends.
    """

    def __init__(self, device: Device, dtype: str | None) -> None:
        self.device = device
        self.dtype = dtype
        self.outermost = dtype is not None and device.autocast is None

    def __enter__(self) -> None:
        if self.outermost and self.dtype is not None:
            self.device.autocast = Autocast(self.dtype)

    def __exit__(self, *_: object) -> None:
        if self.outermost:
            self.device.autocast = None


def cast_down(x: Tensor) -> Tensor:
    """x in the autocast dtype; from the cache where it is an fp32 leaf; itself without autocast."""
    context = x.storage.device.autocast
    if context is None or x.dtype == context.dtype or x.dtype not in _ELIGIBLE:
        return x
    if not (isinstance(x, Parameter) and x.requires_grad and x.dtype == "float32"):
        return to_dtype(x, context.dtype)
    known = context.casts.get(id(x))
    if known is None:
        known = context.casts[id(x)] = (x, to_dtype(x, context.dtype))
    return known[1]
