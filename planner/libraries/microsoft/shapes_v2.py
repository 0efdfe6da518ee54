"""What the authors' Swin Transformer V2 has of its own, on shapes
(github.com/microsoft/Swin-Transformer, f82860b, models/swin_transformer_v2.py).

Shapes and legend as in `shapes.py`.
"""

from __future__ import annotations

from planner.core.schema import SwinConfig
from planner.libraries.maps import BlockPlan
from planner.libraries.microsoft.shapes import SwinTransformerBlock
from planner.libraries.windows import add_shift_mask, position_bias_mlp, spread_bias
from planner.step.matmul import linear, matmul
from planner.step.nn import Dropout, Linear, Module, buffer
from planner.step.normalization import normalize, softmax
from planner.step.pointwise import add, clamp, exp, mul, new_empty, scale, sigmoid
from planner.step.tensor import Device, Parameter, Tensor
from planner.step.views import cat, permute, reshape, select, transpose, unsqueeze, view


class WindowAttentionV2(Module):
    """The authors' WindowAttention of version 2: cosine attention, continuous position bias."""

    def __init__(
        self, device: Device, config: SwinConfig, plan: BlockPlan, window_size: int
    ) -> None:
        dim, heads = plan.channels, plan.heads
        area = window_size**2
        self.heads = heads
        self.logit_scale = Parameter(device, (heads, 1, 1))
        self.cpb_mlp = position_bias_mlp(device, heads)
        sides = 2 * window_size - 1
        self.relative_coords_table = buffer(device, (1, sides, sides, 2))
        self.relative_position_index = buffer(device, (area, area), "int64")
        self.qkv = Linear(device, dim, dim * 3, bias=False)
        self.q_bias = Parameter(device, (dim,)) if config.qkv_bias else None
        self.v_bias = Parameter(device, (dim,)) if config.qkv_bias else None
        self.attn_drop = Dropout(config.attn_drop_rate)
        self.proj = Linear(device, dim, dim)
        self.proj_drop = Dropout(config.drop_rate)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        windows, area, dim = x.shape
        heads = self.heads
        qkv_bias = None
        if self.q_bias is not None and self.v_bias is not None:
            qkv_bias = cat((self.q_bias, zeros_like(self.v_bias), self.v_bias), 0)
        qkv = linear(x, self.qkv.weight, qkv_bias)
        qkv = permute(reshape(qkv, windows, area, 3, heads, -1), 2, 0, 3, 1, 4)
        q, k, v = select(qkv, 0), select(qkv, 0), select(qkv, 0)

        attn = matmul(normalize(q), transpose(normalize(k), -2, -1))
        logit_scale = exp(clamp(self.logit_scale))
        attn = mul(attn, logit_scale)

        relative_position_bias_table = view(self.cpb_mlp(self.relative_coords_table), -1, heads)
        relative_position_bias = spread_bias(
            relative_position_bias_table, self.relative_position_index, area
        )
        relative_position_bias = scale(sigmoid(relative_position_bias))
        attn = add(attn, unsqueeze(relative_position_bias, 0))

        if mask is not None:
            attn = add_shift_mask(attn, mask)
        attn = softmax(attn)
        attn = self.attn_drop(attn)

        x = reshape(transpose(matmul(attn, v), 1, 2), windows, area, dim)
        x = self.proj(x)
        x = self.proj_drop(x)
        return x


def zeros_like(x: Tensor) -> Tensor:
    """`torch.zeros_like(x)`, which needs no gradient."""
    return new_empty(x, x.shape, label="aten.zeros_like")


class SwinTransformerBlockV2(SwinTransformerBlock):
    """The authors' SwinTransformerBlock of version 2."""

    def make_attention(self, device: Device, config: SwinConfig, plan: BlockPlan) -> Module:
        return WindowAttentionV2(device, config, plan, self.window_size)
