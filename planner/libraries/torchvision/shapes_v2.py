"""What torchvision's Swin Transformer V2 has of its own, on shapes (the same file of 0.28.0).

Shapes and legend as in `shapes.py`.
"""

from __future__ import annotations

from planner.libraries.maps import CPB_HIDDEN
from planner.libraries.torchvision.shapes import (
    PatchMerging,
    ShiftedWindowAttention,
    SwinTransformerBlock,
    Windows,
    patch_merging_pad,
    relative_position_bias_of,
    shifted_window_attention,
)
from planner.schema import SwinConfig
from planner.step.nn import LayerNorm, Linear, Module, ReLU, Sequential, buffer
from planner.step.pointwise import add, scale, sigmoid
from planner.step.tensor import Device, Parameter, Tensor
from planner.step.views import view


class ShiftedWindowAttentionV2(ShiftedWindowAttention):
    """torchvision's ShiftedWindowAttentionV2: cosine attention, continuous position bias."""

    def __init__(
        self, device: Device, config: SwinConfig, dim: int, heads: int, windows: Windows
    ) -> None:
        super().__init__(device, config, dim, heads, windows)
        self.logit_scale = Parameter(device, (heads, 1, 1))
        self.cpb_mlp = Sequential(
            Linear(device, 2, CPB_HIDDEN),
            ReLU(in_place=True),
            Linear(device, CPB_HIDDEN, heads, bias=False),
        )

    def make_position_bias(self, device: Device) -> None:
        sides = 2 * self.windows.side - 1
        self.relative_coords_table = buffer(device, (1, sides, sides, 2))

    def get_relative_position_bias(self) -> Tensor:
        relative_position_bias = relative_position_bias_of(
            view(self.cpb_mlp(self.relative_coords_table), -1, self.heads),
            self.relative_position_index,
            self.windows.side**2,
        )
        relative_position_bias = scale(sigmoid(relative_position_bias))
        return relative_position_bias

    def forward(self, x: Tensor) -> Tensor:
        relative_position_bias = self.get_relative_position_bias()
        return shifted_window_attention(
            x,
            self.qkv.weight,
            self.proj.weight,
            relative_position_bias,
            self.windows,
            self.heads,
            self.attention_dropout,
            self.dropout,
            self.qkv.bias,
            self.proj.bias,
            self.logit_scale,
        )


class SwinTransformerBlockV2(SwinTransformerBlock):
    """torchvision's SwinTransformerBlockV2: the norms come after attention and MLP."""

    def make_attention(
        self, device: Device, config: SwinConfig, dim: int, heads: int, windows: Windows
    ) -> Module:
        return ShiftedWindowAttentionV2(device, config, dim, heads, windows)

    def forward(self, x: Tensor) -> Tensor:
        x = add(x, self.stochastic_depth(self.norm1(self.attn(x))))
        x = add(x, self.stochastic_depth(self.norm2(self.mlp(x))))
        return x


class PatchMergingV2(PatchMerging):
    """torchvision's PatchMergingV2: the norm comes after the reduction."""

    def __init__(self, device: Device, dim: int) -> None:
        self.reduction = Linear(device, 4 * dim, 2 * dim, bias=False)
        self.norm = LayerNorm(device, 2 * dim)

    def forward(self, x: Tensor) -> Tensor:
        x = patch_merging_pad(x)
        x = self.reduction(x)
        x = self.norm(x)
        return x
