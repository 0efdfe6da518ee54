"""timm's Swin Transformer V2 on shapes (timm/models/swin_transformer_v2.py, 1.0.31).

To be laid beside that file: same classes, same order of operations, same names for locals, since
what a local keeps alive is memory. Shapes as in `shapes.py`.
"""

from __future__ import annotations

from planner.core.schema import SwinConfig
from planner.libraries.blocks import Mlp, drop_path_or_identity
from planner.libraries.maps import BlockPlan, Pair, clamped_window
from planner.libraries.timm.shapes import (
    PatchMerging,
    SwinTransformer,
    SwinTransformerBlock,
    SwinTransformerStage,
)
from planner.libraries.windows import add_shift_mask, position_bias_mlp, shift_mask, spread_bias
from planner.step.checkpointing import checkpoint
from planner.step.matmul import linear, matmul
from planner.step.nn import Dropout, LayerNorm, Linear, Module, buffer
from planner.step.normalization import normalize, softmax
from planner.step.pointwise import add, clamp, exp, mul, scale, sigmoid
from planner.step.tensor import Device, Parameter, Tensor
from planner.step.views import cat, permute, reshape, transpose, unbind, unsqueeze, view


class WindowAttention(Module):
    """timm's WindowAttention of version 2: cosine attention, continuous position bias."""

    def __init__(self, device: Device, config: SwinConfig, plan: BlockPlan, window: Pair) -> None:
        dim, heads = plan.channels, plan.heads
        self.window_area = window[0] * window[1]
        self.heads = heads
        self.logit_scale = Parameter(device, (heads, 1, 1))
        self.q_bias = Parameter(device, (dim,)) if config.qkv_bias else None
        self.k_bias = buffer(device, (dim,)) if config.qkv_bias else None
        self.v_bias = Parameter(device, (dim,)) if config.qkv_bias else None
        self.cpb_mlp = position_bias_mlp(device, heads)
        self.qkv = Linear(device, dim, dim * 3, bias=False)
        self.attn_drop = Dropout(config.attn_drop_rate)
        self.proj = Linear(device, dim, dim)
        self.proj_drop = Dropout(0.0)
        table = (1, 2 * window[0] - 1, 2 * window[1] - 1, 2)
        self.relative_coords_table = buffer(device, table)
        self.relative_position_index = buffer(device, (self.window_area, self.window_area), "int64")

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        windows, area, dim = x.shape
        heads = self.heads
        if self.q_bias is None:
            qkv = self.qkv(x)
        else:
            assert self.k_bias is not None
            assert self.v_bias is not None
            qkv_bias = cat((self.q_bias, self.k_bias, self.v_bias), 0)
            qkv = linear(x, self.qkv.weight, qkv_bias)
        qkv = permute(reshape(qkv, windows, area, 3, heads, -1), 2, 0, 3, 1, 4)
        q, k, v = unbind(qkv, 0)

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


class SwinTransformerV2Block(SwinTransformerBlock):
    """timm's SwinTransformerV2Block: the norms come after attention and MLP, and
    attention is never fused."""

    def __init__(
        self, device: Device, config: SwinConfig, plan: BlockPlan, resolution: Pair, fused: bool
    ) -> None:
        self.window, self.shift = clamped_window(resolution, plan.window, plan.shifted)
        self.attn = WindowAttention(device, config, plan, self.window)
        self.norm1 = LayerNorm(device, plan.channels)
        self.drop_path1 = drop_path_or_identity(plan.drop_path)
        self.mlp = Mlp(device, plan.channels, plan.hidden, 0.0)
        self.norm2 = LayerNorm(device, plan.channels)
        self.drop_path2 = drop_path_or_identity(plan.drop_path)
        self.attn_mask = shift_mask(device, resolution, self.window) if any(self.shift) else None

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        x = add(x, self.drop_path1(self.norm1(self.attend(x))))
        x = reshape(x, batch, -1, channels)
        x = add(x, self.drop_path2(self.norm2(self.mlp(x))))
        x = reshape(x, batch, height, width, channels)
        return x


class PatchMergingV2(PatchMerging):
    """timm's PatchMerging of version 2: the norm comes after the reduction."""

    def __init__(self, device: Device, dim: int, out_dim: int) -> None:
        self.reduction = Linear(device, 4 * dim, out_dim, bias=False)
        self.norm = LayerNorm(device, out_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gather(x)
        x = self.reduction(x)
        x = self.norm(x)
        return x


class SwinTransformerV2Stage(SwinTransformerStage):
    """timm's SwinTransformerV2Stage: nothing keeps its first block's input."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.downsample(x)
        for blk in self.blocks.modules:
            x = checkpoint(blk, x) if self.checkpointing else blk(x)
        return x


class SwinTransformerV2(SwinTransformer):
    """timm's SwinTransformerV2."""

    block = SwinTransformerV2Block
    merging = PatchMergingV2
    stage = SwinTransformerV2Stage
