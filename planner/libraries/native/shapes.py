"""Our own Swin Transformer on shapes: `native_swin.py` beside this file, line by line.

Legend: B batch, H W feature map in tokens, C channels, nW windows of one image, N tokens
of one window, h heads, d channels of one head; G groups of S windows side by side = B * nW.
"""

from __future__ import annotations

from math import prod

from planner.core.schema import ResolvedSetting, SwinConfig, TrainSetting
from planner.libraries.maps import (
    BlockPlan,
    Pair,
    clamped_window,
    feature_maps,
    padding,
    plan_blocks,
)
from planner.libraries.shared import (
    Merging,
    PatchEmbed,
    crop,
    fold_parities,
    pad_to_even,
    position_bias_mlp,
)
from planner.libraries.shared import spread_bias as spread
from planner.step import nn
from planner.step.engine import checkpoint
from planner.step.matmul import linear, matmul, scaled_dot_product_attention
from planner.step.pointwise import (
    add,
    clamp,
    clamp_min,
    contiguous,
    divide_number,
    dropout,
    exp,
    mean,
    mul,
    scale,
    sigmoid,
)
from planner.step.tensor import Device, Parameter, Tensor
from planner.step.views import (
    cat,
    flatten,
    pad,
    permute,
    reshape,
    roll,
    transpose,
    unbind,
    unsqueeze,
    view,
)

# How native's Swin cuts a stage's feature map into windows, in numbers. Imports no torch.


class WindowLayout:
    """The window is clamped to the feature map on each axis, and an axis that it covers is not
    shifted. A feature map that the window does not divide is padded with zeros at the bottom and on
    the right, and attention sees the padding, as it does in the other libraries.

    All pairs are (height, width) in tokens, `counts` in windows.
    """

    def lay_out(self, feature_map: Pair, side: int) -> None:
        """`side` is the window's, as it is configured."""
        rows, columns = feature_map
        self.feature_map = feature_map
        self.window, self.shift = clamped_window(feature_map, side, shifted=True)
        height, width = self.window
        self.padding = (padding(rows, height), padding(columns, width))
        self.counts = (-(-rows // height), -(-columns // width))
        self.has_shift = any(self.shift)
        self.has_padding = any(self.padding)
        self.num_windows = self.counts[0] * self.counts[1]
        self.num_tokens = height * width
        self.num_positions = (2 * height - 1) * (2 * width - 1)


class SwinTransformer(nn.Module):
    """Images [B, in_channels, height, width] to logits [B, num_classes]."""

    def __init__(self, device: Device, config: SwinConfig, setting: TrainSetting) -> None:
        self.checkpoint_blocks = setting.checkpointing == "blocks"
        self.checkpointed_stages: tuple[int, ...] = setting.checkpointed_stages or ()
        if setting.checkpointing == "stages":
            self.checkpointed_stages = tuple(range(config.num_stages))
        maps = feature_maps(config)
        self.absolute_pos_embed = (
            Parameter(device, (1, prod(maps[0]), config.embed_dim))
            if config.absolute_position_embedding
            else None
        )
        self.patch_embed = PatchEmbed(device, config)
        self.pos_drop = nn.Dropout(config.drop_rate)
        fused = setting.attention == "sdpa"
        self.layers = [
            Stage(device, config, stage, feature_map, fused)
            for stage, feature_map in enumerate(maps)
        ]
        channels = config.stage_channels(config.num_stages - 1)
        self.norm = nn.LayerNorm(device, channels)
        self.head = nn.Linear(device, channels, config.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images)
        if self.absolute_pos_embed is not None:
            x = add(x, view(self.absolute_pos_embed, 1, *x.shape[1:]))
        x = self.pos_drop(x)
        for number, stage in enumerate(self.layers):
            if number in self.checkpointed_stages:
                x = checkpoint(stage, x)
            else:
                x = stage(x, self.checkpoint_blocks)
        x = mean(self.norm(x), (1, 2))
        logits: Tensor = self.head(x)
        return logits


class Stage(nn.Module):
    """Blocks at one resolution, then (but in the last stage) a patch merging."""

    def __init__(
        self, device: Device, config: SwinConfig, stage: int, feature_map: Pair, fused: bool
    ) -> None:
        block = BlockV1 if config.version == 1 else BlockV2
        self.grid = WindowGrid(device, config, stage, feature_map)
        self.blocks = [
            block(device, config, plan, self.grid, fused) for plan in plan_blocks(config, stage)
        ]
        last = stage == config.num_stages - 1
        channels = config.stage_channels(stage)
        self.downsample = None if last else PatchMerging(device, channels, config.version)

    def forward(self, x: Tensor, checkpoint_blocks: bool = False) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, self.grid) if checkpoint_blocks else block(x, self.grid)
        if self.downsample is not None:
            x = self.downsample(x)
        return x


class WindowGrid(WindowLayout, nn.Module):
    """How a stage's feature map is cut into windows, and the buffers all its blocks share."""

    def __init__(self, device: Device, config: SwinConfig, stage: int, feature_map: Pair) -> None:
        self.lay_out(feature_map, config.windows[stage])
        tokens = self.num_tokens
        self.relative_position_index = nn.buffer(device, (tokens * tokens,), "int64")
        self.shift_mask = (
            nn.buffer(device, (self.num_windows, 1, tokens, tokens)) if self.has_shift else None
        )
        self.relative_coordinates = (
            nn.buffer(device, (self.num_positions, 2)) if config.version == 2 else None
        )

    def partition(self, x: Tensor, shifted: bool) -> Tensor:
        """[B, H, W, C] to windows [B * nW, N, 1, C], or, shifted, side by side: [B, N, nW, C]."""
        x = self.pad(x)
        if shifted:
            x = roll(x)
        batch, _, _, channels = x.shape
        (rows, columns), (height, width) = self.counts, self.window
        x = view(x, batch, rows, height, columns, width, channels)
        if shifted:
            x = permute(x, 0, 2, 4, 1, 3, 5)
            return reshape(x, batch, self.num_tokens, self.num_windows, channels)
        x = permute(x, 0, 1, 3, 2, 4, 5)
        return reshape(x, batch * self.num_windows, self.num_tokens, 1, channels)

    def merge(self, x: Tensor, shifted: bool) -> Tensor:
        """The way back from `partition`: [B, H, W, C]."""
        channels = x.shape[-1]
        (rows, columns), (height, width) = self.counts, self.window
        if shifted:
            x = view(x, -1, height, width, rows, columns, channels)
            x = permute(x, 0, 3, 1, 4, 2, 5)
        else:
            x = view(x, -1, rows, columns, height, width, channels)
            x = permute(x, 0, 1, 3, 2, 4, 5)
        x = reshape(x, -1, rows * height, columns * width, channels)
        if shifted:
            x = roll(x)
        return self.crop(x)

    def pad(self, x: Tensor) -> Tensor:
        if self.has_padding:
            x = pad(x, *self.padding)
        return x

    def crop(self, x: Tensor) -> Tensor:
        if self.has_padding:
            x = contiguous(crop(x, *self.feature_map))
        return x


class Block(nn.Module):
    """Window attention and an MLP, each with a residual connection."""

    attention: type[WindowAttention]

    def __init__(
        self, device: Device, config: SwinConfig, plan: BlockPlan, grid: WindowGrid, fused: bool
    ) -> None:
        self.shifted = plan.shifted and grid.has_shift
        self.norm1 = nn.LayerNorm(device, plan.channels)
        self.drop_path = nn.DropPath(plan.drop_path)
        self.norm2 = nn.LayerNorm(device, plan.channels)
        self.mlp = Mlp(device, plan.channels, plan.hidden, config.drop_rate)
        self.attn = self.attention(device, config, plan, grid, fused)

    def attend(self, x: Tensor, grid: WindowGrid) -> Tensor:
        x = grid.partition(x, self.shifted)
        x = self.attn(x, grid, grid.shift_mask if self.shifted else None)
        return grid.merge(x, self.shifted)


class WindowAttention(nn.Module):
    """The part that the attentions of both versions share; G groups of S windows side by side."""

    def __init__(
        self, device: Device, config: SwinConfig, plan: BlockPlan, grid: WindowGrid, fused: bool
    ) -> None:
        self.num_heads = plan.heads
        self.dropout = config.attn_drop_rate
        self.attend = attend_fused if fused else attend_eager


class WindowAttentionV1(WindowAttention):
    """Scaled dot-product attention in windows, with a learned bias for each relative position."""

    def __init__(
        self, device: Device, config: SwinConfig, plan: BlockPlan, grid: WindowGrid, fused: bool
    ) -> None:
        super().__init__(device, config, plan, grid, fused)
        channels = plan.channels
        self.relative_position_bias_table = Parameter(device, (grid.num_positions, self.num_heads))
        self.qkv = nn.Linear(device, channels, 3 * channels, bias=config.qkv_bias)
        self.proj = nn.Linear(device, channels, channels)
        self.proj_drop = nn.Dropout(config.drop_rate)

    def forward(self, x: Tensor, grid: WindowGrid, mask: Tensor | None) -> Tensor:
        q, k, v = split_heads(self.qkv(x), self.num_heads)
        bias = spread_bias(self.relative_position_bias_table, grid)
        if mask is not None:
            bias = add(bias, mask)
        x = self.attend(q, k, v, bias, True, self.dropout)
        out: Tensor = self.proj_drop(self.proj(x))
        return out


class WindowAttentionV2(WindowAttention):
    """Cosine attention in windows with a learned temperature and a continuous position bias."""

    def __init__(
        self, device: Device, config: SwinConfig, plan: BlockPlan, grid: WindowGrid, fused: bool
    ) -> None:
        super().__init__(device, config, plan, grid, fused)
        channels = plan.channels
        has_bias = config.qkv_bias
        self.logit_scale = Parameter(device, (self.num_heads, 1, 1))
        self.q_bias = Parameter(device, (channels,)) if has_bias else None
        self.v_bias = Parameter(device, (channels,)) if has_bias else None
        self.k_bias = nn.buffer(device, (channels,)) if has_bias else None
        self.cpb_mlp = position_bias_mlp(device, self.num_heads)
        self.qkv = nn.Linear(device, channels, 3 * channels, bias=False)
        self.proj = nn.Linear(device, channels, channels)
        self.proj_drop = nn.Dropout(config.drop_rate)

    def forward(self, x: Tensor, grid: WindowGrid, mask: Tensor | None) -> Tensor:
        qkv_bias = None
        if self.q_bias is not None and self.k_bias is not None and self.v_bias is not None:
            qkv_bias = cat((self.q_bias, self.k_bias, self.v_bias), 0)
        q, k, v = split_heads(linear(x, self.qkv.weight, qkv_bias), self.num_heads)
        q = mul(q, mul(exp(clamp(self.logit_scale)), inverse_norm(q)))
        k = mul(k, inverse_norm(k))
        table = scale(sigmoid(self.cpb_mlp(grid.relative_coordinates)))
        bias = spread_bias(table, grid)
        if mask is not None:
            bias = add(bias, mask)
        x = self.attend(q, k, v, bias, False, self.dropout)
        out: Tensor = self.proj_drop(self.proj(x))
        return out


class BlockV1(Block):
    """Norms before attention and MLP."""

    attention = WindowAttentionV1

    def forward(self, x: Tensor, grid: WindowGrid) -> Tensor:
        x = add(x, self.drop_path(self.attend(self.norm1(x), grid)))
        x = add(x, self.drop_path(self.mlp(self.norm2(x))))
        return x


class BlockV2(Block):
    """Norms after attention and MLP."""

    attention = WindowAttentionV2

    def forward(self, x: Tensor, grid: WindowGrid) -> Tensor:
        x = add(x, self.drop_path(self.norm1(self.attend(x, grid))))
        x = add(x, self.drop_path(self.norm2(self.mlp(x))))
        return x


def split_heads(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """[G, N, S, 3C] to q, k and v, each a view [G, S, h, N, d]."""
    groups, tokens, side_by_side, wide = qkv.shape
    q, k, v = unbind(
        view(qkv, groups, tokens, side_by_side, 3, num_heads, wide // 3 // num_heads), 3
    )
    return permute(q, 0, 2, 3, 1, 4), permute(k, 0, 2, 3, 1, 4), permute(v, 0, 2, 3, 1, 4)


def spread_bias(table: Tensor, grid: WindowGrid) -> Tensor:
    """A bias for each relative position and head to one for each pair: [1, h, N, N]."""
    return unsqueeze(spread(table, grid.relative_position_index, grid.num_tokens), 0)


def inverse_norm(x: Tensor) -> Tensor:
    """1 / norm over the last axis, [.., 1]."""
    norm = nn.vector_norm(x)
    return divide_number(clamp_min(norm))


def attend_eager(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scaled: bool, rate: float
) -> Tensor:
    """softmax(q k^T + bias) v, written out, to [G, N, S, C]."""
    if scaled:
        q = scale(q)
    scores = matmul(q, transpose(k, -2, -1))
    scores = add(scores, bias)
    weights = nn.softmax(scores)
    if rate > 0.0:
        weights = dropout(weights, rate)
    x = matmul(weights, v)
    return flatten(permute(x, 0, 3, 1, 2, 4), 3)


def attend_fused(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scaled: bool, rate: float
) -> Tensor:
    """The same in one kernel: windows side by side become heads, [G, S * h, N, d]."""
    groups, side_by_side, _, tokens, _ = q.shape
    q, k, v = flatten(q, 1, 2), flatten(k, 1, 2), flatten(v, 1, 2)
    bias = unsqueeze(flatten(bias, 0, 1), 0)
    x = scaled_dot_product_attention(q, k, v, bias, rate)
    return reshape(transpose(x, 1, 2), groups, tokens, side_by_side, -1)


class Mlp(nn.Module):
    """fc1, GELU, dropout, fc2, dropout."""

    def __init__(self, device: Device, channels: int, hidden: int, rate: float) -> None:
        self.fc1 = nn.Linear(device, channels, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(device, hidden, channels)
        self.drop = nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        x = self.act(x)
        x = self.drop(x)
        x = self.fc2(x)
        out: Tensor = self.drop(x)
        return out


class PatchMerging(Merging):
    """[B, H, W, C] to [B, H/2, W/2, 2C], rounded up."""

    def forward(self, x: Tensor) -> Tensor:
        x = fold_parities(pad_to_even(x))
        norm, reduction = self.norm, self.reduction
        first, second = (norm, reduction) if self.version == 1 else (reduction, norm)
        merged: Tensor = second(first(x))
        return merged


def build(device: Device, config: SwinConfig, setting: ResolvedSetting) -> nn.Module:
    """The model of `config` with the attention and checkpointing of a resolved `setting`."""
    return SwinTransformer(device, config, setting)
