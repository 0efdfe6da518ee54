"""The window attention of a library's real block, by itself. Needs torch.

Legend: B images, H × W feature map, C channels, N tokens of a window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from planner.libraries.registry import find_library
from planner.schema.bench import BenchCase, BenchPrecision

# Of the norm of what float64 gives. A product in a precision rounds to 2⁻²⁴ (fp32), 2⁻¹¹ (tf32,
# fp16) or 2⁻⁸ (bf16) of itself; ten times that and more is taken for the roundings on the way from
# the input to its gradient. A path without its bias or its mask is off by more than all of them.
TOLERANCES: dict[BenchPrecision, float] = {"fp32": 1e-5, "tf32": 5e-3, "fp16": 5e-3, "bf16": 4e-2}
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Images that are computed in float64 as well: each is by itself.
_CHECKED_IMAGES = 2


class WindowAttention(nn.Module):
    """[B, H, W, C] to the same: roll, partition, attention with its projections, and back."""

    def __init__(self, case: BenchCase) -> None:
        super().__init__()
        spec = find_library(case.library)
        model = spec.build(case.model, spec.resolve(case.model, case.setting.uncompiled()))
        blocks = [m for m in model.modules() if type(m).__name__ in spec.block_classes]
        self.block = blocks[case.shifted]
        if case.library == "native":
            self.grid = next(m for m in model.modules() if type(m).__name__ == "WindowGrid")
        if case.library in ("transformers", "microsoft"):
            own: Any = type(self.block).__init__.__globals__  # of the file that the block is from
            self.partition, self.reverse = own["window_partition"], own["window_reverse"]
        self.attend = getattr(self, f"_attend_{case.library}")
        spread_position_biases(self.block, case.heads)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.attend(self.block, x)
        return found

    def _attend_native(self, block: Any, x: Tensor) -> Any:
        return block.attend(x, self.grid)

    def _attend_timm(self, block: Any, x: Tensor) -> Any:
        return block._attn(x)

    def _attend_torchvision(self, block: Any, x: Tensor) -> Any:
        return block.attn(x)

    def _attend_transformers(self, layer: Any, x: Tensor) -> Any:
        """Between the norms of `SwinLayer.forward` and `Swinv2Layer.forward`."""
        _, height, width, channels = x.shape
        side, shift = layer.window_size, layer.shift_size
        x, _ = layer.maybe_pad(x, height, width)
        _, padded_height, padded_width, _ = x.shape
        mask = layer.get_attn_mask(padded_height, padded_width, dtype=x.dtype, device=x.device)
        if shift > 0:
            x = x.roll((-shift, -shift), (1, 2))
        windows = self.partition(x, side).view(-1, side * side, channels)
        windows = layer.attention(windows, mask)[0]
        windows = windows.view(-1, side, side, channels)
        x = self.reverse(windows, side, padded_height, padded_width)
        if shift > 0:
            x = x.roll((shift, shift), (1, 2))
        if (padded_height, padded_width) != (height, width):
            x = x[:, :height, :width].contiguous()
        return x

    def _attend_microsoft(self, block: Any, x: Tensor) -> Any:
        """Between the shortcuts of the authors' `SwinTransformerBlock.forward`, unfused."""
        _, height, width, channels = x.shape
        side, shift = block.window_size, block.shift_size
        if shift > 0:
            x = x.roll((-shift, -shift), (1, 2))
        windows = self.partition(x, side).view(-1, side * side, channels)
        windows = block.attn(windows, mask=block.attn_mask)
        windows = windows.view(-1, side, side, channels)
        x = self.reverse(windows, side, height, width)
        return x.roll((shift, shift), (1, 2)) if shift > 0 else x


def spread_position_biases(block: nn.Module, heads: int) -> None:
    """Makes what is added to the scores large enough that a path without it is found out: freshly
    initialised it is next to nothing."""
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if "relative_position_bias_table" in name:
                parameter.normal_(std=1.0)
            elif _is_last_of_mlp(name) and parameter.shape[0] == heads:
                parameter.normal_(std=0.5)


def _is_last_of_mlp(name: str) -> bool:
    """Version 2's MLP of positions, by its names in the libraries; its last layer has no bias."""
    return ("cpb_mlp" in name or "continuous_position_bias_mlp" in name) and name.endswith("weight")


class Subject:
    """One case on a device: its attention, compiled or not, its input and its output's gradient."""

    def __init__(self, case: BenchCase, device: str) -> None:
        torch.manual_seed(0)
        self.case = case
        self.device = torch.device(device)
        self.plain = WindowAttention(case).to(self.device)
        self.call: Any = self.plain
        if case.is_compiled:
            torch._dynamo.reset()
            arguments: Any = case.setting.compile_arguments
            self.call = torch.compile(self.plain, **arguments)
        shape = (case.batch_size, *case.feature_map, case.channels)
        self.x = torch.randn(shape, device=self.device, requires_grad=True)
        self.ahead = torch.randn(shape, device=self.device)
        self.inputs: list[Tensor] = [self.x]

    def forward(self) -> Tensor:
        with self._autocast():
            out: Tensor = self.call(self.x)
        return out

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.inputs, self.ahead.to(out.dtype))

    def first(self) -> tuple[Tensor, Tensor]:
        """The first call, which compiles and finds out which weights attention has: output and
        input gradient."""
        out = self.forward()
        weights = [p for p in self.plain.parameters() if p.requires_grad]
        found = torch.autograd.grad(
            out, [self.x, *weights], self.ahead.to(out.dtype), allow_unused=True
        )
        self.inputs += [w for w, g in zip(weights, found[1:], strict=True) if g is not None]
        assert found[0] is not None
        return out.detach(), found[0]

    def difference(self, out: Tensor, gradient: Tensor) -> float:
        """How far output and input gradient are from explicit attention in float64, relative."""
        explicit = self.case.model_copy(update={"path": "eager", "precision": "fp32"})
        reference = WindowAttention(explicit).to(self.device)
        reference.load_state_dict(self.plain.state_dict())
        reference.double()
        x = self.x[:_CHECKED_IMAGES].detach().double().requires_grad_()
        expected = reference(x)
        ahead = self.ahead[:_CHECKED_IMAGES].to(out.dtype).double()
        (expected_gradient,) = torch.autograd.grad(expected, x, ahead)
        return max(_off(out, expected), _off(gradient, expected_gradient))

    def saved_bytes(self) -> int:
        """What autograd keeps between forward and backward, but for weights, buffers and input."""
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            out = self.forward()
        for there in self._there():
            kept.pop(there.untyped_storage().data_ptr(), None)
        del out
        return sum(kept.values())

    def _there(self) -> Iterator[Tensor]:
        yield self.x
        yield from self.plain.parameters()
        yield from self.plain.buffers()

    def _autocast(self) -> AbstractContextManager[object]:
        dtype = _AUTOCAST.get(self.case.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)


def _off(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference, relative; infinite where something is no number."""
    difference = found[: len(expected)].double() - expected.detach()
    off = float(difference.norm() / expected.detach().norm())
    return float("inf") if math.isnan(off) else off
