"""What torchvision's Swin Transformer V2 has of its own, on shapes (the same file of 0.28.0).

Shapes and legend as in `shapes.py`.
"""

from __future__ import annotations

from planner.core.schema import SwinConfig
from planner.libraries.maps import BlockPlan
from planner.libraries.torchvision.shapes import (
    ShiftedWindowAttention,
    SwinTransformerBlock,
    Windows,
)
from planner.libraries.windows import position_bias_mlp, spread_bias
from planner.step.nn import buffer
from planner.step.pointwise import add, scale, sigmoid
from planner.step.tensor import Device, Parameter, Tensor
from planner.step.views import unsqueeze, view


class ShiftedWindowAttentionV2(ShiftedWindowAttention):
    """torchvision's ShiftedWindowAttentionV2: cosine attention, continuous position bias."""

    def __init__(
        self, device: Device, config: SwinConfig, plan: BlockPlan, windows: Windows
    ) -> None:
        super().__init__(device, config, plan, windows)
        self.logit_scale = Parameter(device, (plan.heads, 1, 1))
        self.cpb_mlp = position_bias_mlp(device, plan.heads)

    def make_position_bias(self, device: Device) -> None:
        sides = 2 * self.windows.side - 1
        self.relative_coords_table = buffer(device, (1, sides, sides, 2))

    def get_relative_position_bias(self) -> Tensor:
        relative_position_bias = spread_bias(
            view(self.cpb_mlp(self.relative_coords_table), -1, self.heads),
            self.relative_position_index,
            self.windows.side**2,
        )
        relative_position_bias = unsqueeze(relative_position_bias, 0)
        relative_position_bias = scale(sigmoid(relative_position_bias))
        return relative_position_bias


class SwinTransformerBlockV2(SwinTransformerBlock):
    """torchvision's SwinTransformerBlockV2: the norms come after attention and MLP."""

    attention = ShiftedWindowAttentionV2

    def forward(self, x: Tensor) -> Tensor:
        x = add(x, self.stochastic_depth(self.norm1(self.attn(x))))
        x = add(x, self.stochastic_depth(self.norm2(self.mlp(x))))
        return x
