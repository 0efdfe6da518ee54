"""The window attention of a library's real block, by itself: checked, then timed. Needs torch.

Legend: B images, H × W feature map, C channels, N tokens of a window.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Measurement, TaskSpec, Timer

from planner.core.errors import PlannerError
from planner.core.files import open_at_once
from planner.libraries.registry import find_library
from search.probe.protocol import ProbeRequest
from search.probe.worker.precision import check_matrix_units, set_precision
from search.tuning.benches.cases import Case

# Of the norm of what float64 gives. A product in a precision rounds to 2⁻²⁴ (fp32), 2⁻¹¹ (tf32,
# fp16) or 2⁻⁸ (bf16) of itself; ten times that and more is taken for the roundings on the way from
# the input to its gradient. A path without its bias or its mask is off by more than all of them.
TOLERANCES = {"fp32": 1e-5, "tf32": 5e-3, "fp16": 5e-3, "bf16": 4e-2}
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Images that are computed in float64 as well: each is by itself.
_CHECKED_IMAGES = 2
_SAVE = "Write them with 'planner bench attention --output FILE'."


class WindowAttention(nn.Module):
    """[B, H, W, C] to the same: roll, partition, attention with its projections, and back."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        spec = find_library(case.model.library)
        model = spec.build(case.model, spec.resolve(case.model, case.setting.uncompiled()))
        blocks = [m for m in model.modules() if type(m).__name__ in spec.block_classes]
        self.block = blocks[case.shifted]
        if case.model.library == "native":
            self.grid = next(m for m in model.modules() if type(m).__name__ == "WindowGrid")
        if case.model.library in ("transformers", "microsoft"):
            own: Any = type(self.block).__init__.__globals__  # of the file that the block is from
            self.partition, self.reverse = own["window_partition"], own["window_reverse"]
        self.attend = getattr(self, f"_attend_{case.model.library}")
        spread_position_biases(self.block, case.model.num_heads[0])

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

    def __init__(self, case: Case, device: str) -> None:
        torch.manual_seed(0)
        self.case = case
        self.device = torch.device(device)
        self.plain = WindowAttention(case).to(self.device)
        self.call: Any = self.plain
        if case.setting.compile != "off":
            torch._dynamo.reset()
            arguments: Any = case.setting.compile_arguments
            self.call = torch.compile(self.plain, **arguments)
        self.x = torch.randn(case.input_shape, device=self.device, requires_grad=True)
        self.ahead = torch.randn(case.input_shape, device=self.device)

    def forward(self) -> Tensor:
        with self._autocast():
            out: Tensor = self.call(self.x)
        return out

    def both(self) -> None:
        """Forward and backward; gradients are made anew, as after `zero_grad()`."""
        self.x.grad = None
        self.plain.zero_grad()
        out = self.forward()
        out.backward(self.ahead.to(out.dtype))

    def difference(self) -> float:
        """How far output and input gradient are from explicit attention in float64, relative."""
        out = self.forward()
        (gradient,) = torch.autograd.grad(out, self.x, self.ahead.to(out.dtype))
        setting = self.case.setting.model_copy(
            update={"attention": "eager", "precision": "fp32", "compile": "off"}
        )
        reference = WindowAttention(replace(self.case, setting=setting)).to(self.device)
        reference.load_state_dict(self.plain.state_dict())
        reference.double()
        x = self.x[:_CHECKED_IMAGES].detach().double().requires_grad_()
        expected = reference(x)
        ahead = self.ahead[:_CHECKED_IMAGES].to(out.dtype).double()
        (expected_gradient,) = torch.autograd.grad(expected, x, ahead)
        return max(_off(out, expected), _off(gradient, expected_gradient))

    def _autocast(self) -> AbstractContextManager[object]:
        dtype = _AUTOCAST.get(self.case.setting.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)


def time_case(case: Case, device: str, seconds: float, env: str) -> list[Measurement]:
    """The forward pass, and forward and backward, for `seconds` each at least.

    Raises UnsupportedError for a precision that the device lacks, and PlannerError for a wrong
    result, which is not timed.
    """
    request = ProbeRequest(model=case.model, setting=case.setting, device=device)
    check_matrix_units(request)
    set_precision(request)
    subject = Subject(case, device)
    difference, tolerance = subject.difference(), TOLERANCES[case.setting.precision]
    if not difference <= tolerance:
        raise PlannerError(
            f"WRONG, and so not timed: output or gradient is off by {difference:.2g} of what "
            f"float64 gives, and at most {tolerance:g} is rounding."
        )
    return [
        Timer(
            "call()", globals={"call": call}, label=f"{case.table}; {title}", sub_label=case.row,
            description=case.path, env=env, num_threads=torch.get_num_threads(),
        ).blocked_autorange(min_run_time=seconds)
        for title, call in (("forward", subject.forward), ("forward and backward", subject.both))
    ]  # fmt: skip


def load(path: Path) -> list[Measurement]:
    """What `torch.save` wrote of them, and nothing that a file could run. Raises PlannerError."""
    try:
        with (
            torch.serialization.safe_globals([Measurement, TaskSpec]),
            open(path, "rb", opener=open_at_once) as file,
        ):
            found: list[Measurement] = torch.load(file, weights_only=True)
    except Exception as error:  # whatever its unpickler meets: a file may hold anything
        raise PlannerError(f"{path} holds no measurements.", _SAVE) from error
    return found


def _off(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference, relative; infinite where something is no number."""
    expected = expected.detach()
    difference = found[: len(expected)].detach().double() - expected
    off = float(difference.norm() / expected.norm())
    return float("inf") if math.isnan(off) else off
