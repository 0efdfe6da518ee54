"""What the authors' Swin Transformer V2 has of its own, on shapes
(github.com/microsoft/Swin-Transformer, f82860b, models/swin_transformer_v2.py).

Shapes and legend as in `shapes.py`.
"""

from __future__ import annotations

from planner.libraries.maps import CPB_HIDDEN
from planner.libraries.microsoft.shapes import (
    Pair,
    PatchMerging,
    SwinTransformerBlock,
    window_partition,
    window_reverse,
)
from planner.schema import SwinConfig
from planner.step.matmul import linear, matmul
from planner.step.nn import Dropout, LayerNorm, Linear, Module, ReLU, Sequential, buffer
from planner.step.normalization import normalize, softmax
from planner.step.pointwise import add, clamp, exp, mul, new_empty, scale, sigmoid
from planner.step.tensor import Device, Parameter, Tensor
from planner.step.views import (
    cat,
    contiguous,
    permute,
    reshape,
    roll,
    select,
    take_rows,
    transpose,
    unsqueeze,
    view,
)


class WindowAttentionV2(Module):
    """The authors' WindowAttention of version 2: cosine attention, continuous position bias."""

    def __init__(
        self, device: Device, config: SwinConfig, dim: int, heads: int, window_size: int
    ) -> None:
        self.area = window_size**2
        self.heads = heads
        self.logit_scale = Parameter(device, (heads, 1, 1))
        self.cpb_mlp = Sequential(
            Linear(device, 2, CPB_HIDDEN),
            ReLU(in_place=True),
            Linear(device, CPB_HIDDEN, heads, bias=False),
        )
        sides = 2 * window_size - 1
        self.relative_coords_table = buffer(device, (1, sides, sides, 2))
        self.relative_position_index = buffer(device, (self.area, self.area), "int64")
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
        relative_position_bias = view(
            take_rows(relative_position_bias_table, view(self.relative_position_index, -1)),
            area, area, -1,
        )  # fmt: skip
        relative_position_bias = contiguous(permute(relative_position_bias, 2, 0, 1))
        relative_position_bias = scale(sigmoid(relative_position_bias))
        attn = add(attn, unsqueeze(relative_position_bias, 0))

        if mask is not None:
            num_windows = mask.shape[0]
            attn = add(
                view(attn, -1, num_windows, heads, area, area), unsqueeze(unsqueeze(mask, 1), 0)
            )
            attn = view(attn, -1, heads, area, area)
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
    """The authors' SwinTransformerBlock of version 2: the norms come after attention and MLP."""

    def make_attention(self, device: Device, config: SwinConfig, dim: int, heads: int) -> Module:
        return WindowAttentionV2(device, config, dim, heads, self.window_size)

    def forward(self, x: Tensor) -> Tensor:
        height, width = self.input_resolution
        batch, _, channels = x.shape

        shortcut = x
        x = view(x, batch, height, width, channels)

        shifted_x = roll(x) if self.shift_size > 0 else x
        x_windows = window_partition(shifted_x, self.window_size)
        x_windows = view(x_windows, -1, self.window_size**2, channels)
        attn_windows = self.attn(x_windows, self.attn_mask)
        attn_windows = view(attn_windows, -1, self.window_size, self.window_size, channels)
        shifted_x = window_reverse(attn_windows, self.window_size, height, width)
        x = roll(shifted_x) if self.shift_size > 0 else shifted_x
        x = view(x, batch, height * width, channels)
        x = add(shortcut, self.drop_path(self.norm1(x)))

        x = add(x, self.drop_path(self.norm2(self.mlp(x))))
        return x


class PatchMergingV2(PatchMerging):
    """The authors' PatchMerging of version 2: the norm comes after the reduction."""

    def __init__(self, device: Device, input_resolution: Pair, dim: int) -> None:
        self.input_resolution = input_resolution
        self.reduction = Linear(device, 4 * dim, 2 * dim, bias=False)
        self.norm = LayerNorm(device, 2 * dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gather(x)
        x = self.reduction(x)
        x = self.norm(x)
        return x
