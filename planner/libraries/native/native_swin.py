# Written by 'planner emit', which replaces files that begin with this line.
"""Our own Swin Transformer, versions 1 and 2: the field's window attention, written for training.

Legend: B batch, H × W feature map in tokens, C channels, nW windows of one image, N tokens of one
window, h heads, d channels of one head; G groups × S windows side by side = B × nW.

It differs from the other libraries, with the same results, in this:
- relative-position indices, coordinates and the shift mask are made once, in `WindowGrid`, one for
  all blocks of a stage;
- a feature map that the window divides is not padded (a zero `F.pad` still copies);
- in shifted blocks the windows of an image lie side by side as further heads, so that bias + mask
  is broadcast over the batch instead of being written out for every image;
- q, k and v part before they are transposed, which spares a copy in backward;
- version 2 scales the queries, [.., N, d], and not the scores, [.., N, N], which autograd keeps.

Parameters carry the names of the original Swin checkpoints. Imports only torch: `planner emit` puts
a copy beside a script that trains it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Attention = Literal["eager", "sdpa"]
PadOrder = Literal["before-shift", "after-shift"]
Pair = tuple[int, int]

CPB_HIDDEN = 512  # version 2: channels in the MLP of the position bias
MAX_LOGIT_SCALE = math.log(100.0)  # version 2: the temperature's ceiling, arXiv 2111.09883 §3.2
BIAS_CEILING = 16.0  # version 2: the position bias is 16 × sigmoid, the authors' configuration
MASKED = -100.0  # added to the score of two tokens that are no neighbours, as in every Swin


@dataclass(frozen=True)
class SwinConfig:
    """A Swin Transformer: sizes in pixels or tokens, rates as probabilities. Windows are per stage;
    a `pretrained_windows` of 0 is none."""

    version: int = 1
    image_size: Pair = (224, 224)
    patch_size: int = 4
    in_channels: int = 3
    num_classes: int = 1000
    embed_dim: int = 96
    depths: tuple[int, ...] = (2, 2, 6, 2)
    num_heads: tuple[int, ...] = (3, 6, 12, 24)
    windows: tuple[int, ...] = (7, 7, 7, 7)
    pretrained_windows: tuple[int, ...] = (0, 0, 0, 0)
    mlp_ratio: float = 4.0
    qkv_bias: bool = True
    drop_rate: float = 0.0
    attn_drop_rate: float = 0.0
    drop_path_rate: float = 0.1
    patch_norm: bool = True
    absolute_position_embedding: bool = False

    @property
    def feature_maps(self) -> list[Pair]:
        """(height, width) of each stage's map in tokens, odd sides rounded up on halving."""
        height, width = (side // self.patch_size for side in self.image_size)
        maps = []
        for _ in self.depths:
            maps.append((height, width))
            height, width = (height + 1) // 2, (width + 1) // 2
        return maps


@dataclass(frozen=True)
class BlockPlan:
    """The sizes of a block; `hidden` is the number of channels within the MLP."""

    channels: int
    hidden: int
    heads: int
    shifted: bool
    drop_path: float


def plan_blocks(config: SwinConfig, stage: int) -> list[BlockPlan]:
    """The blocks of a stage in order: every second one is shifted, and drop path rises linearly."""
    channels, heads = config.embed_dim << stage, config.num_heads[stage]
    first, total = sum(config.depths[:stage]), sum(config.depths)
    step = config.drop_path_rate / (total - 1) if total > 1 else 0.0
    return [
        BlockPlan(
            channels,
            int(channels * config.mlp_ratio),
            heads,
            index % 2 == 1,
            (first + index) * step,
        )
        for index in range(config.depths[stage])
    ]


def build_swin(
    config: SwinConfig, attention: Attention = "sdpa", pad_order: PadOrder = "before-shift"
) -> SwinTransformer:
    """The model of `config`, freshly initialised, in training mode. `pad_order` only matters where
    a feature map is both padded and shifted: padding comes first, as in transformers, torchvision
    and the authors' detection code; "after-shift" is timm's order."""
    return SwinTransformer(config, attention, pad_order)


class SwinTransformer(nn.Module):
    """Images [B, in_channels, height, width] to logits [B, num_classes]; the size is fixed."""

    def __init__(self, config: SwinConfig, attention: Attention, pad_order: PadOrder) -> None:
        super().__init__()
        self.image_size = config.image_size
        self.patch_embed = PatchEmbedding(config)
        maps = config.feature_maps
        self.absolute_pos_embed = (
            nn.Parameter(torch.zeros(1, math.prod(maps[0]), config.embed_dim))
            if config.absolute_position_embedding
            else None
        )
        self.pos_drop = nn.Dropout(config.drop_rate)
        self.layers = nn.ModuleList(
            Stage(config, stage, feature_map, attention, pad_order)
            for stage, feature_map in enumerate(maps)
        )
        channels = config.embed_dim << len(config.depths) - 1
        self.norm = nn.LayerNorm(channels)
        self.head = nn.Linear(channels, config.num_classes)
        self.apply(initialise)

    def forward(self, images: Tensor) -> Tensor:
        if tuple(images.shape[-2:]) != self.image_size:
            raise ValueError(
                f"this model takes images of {self.image_size[0]}x{self.image_size[1]} pixels, "
                f"not {images.shape[-2]}x{images.shape[-1]}"
            )
        x = self.patch_embed(images)  # [B, H, W, C]
        if self.absolute_pos_embed is not None:
            x = x + self.absolute_pos_embed.view(1, *x.shape[1:])
        x = self.pos_drop(x)
        for stage in self.layers:
            x = stage(x)
        x = self.norm(x).mean(dim=(1, 2))
        logits: Tensor = self.head(x)
        return logits


class PatchEmbedding(nn.Module):
    """Images [B, in_channels, height, width] to patches [B, H, W, C]; a rest of a patch is cut."""

    def __init__(self, config: SwinConfig) -> None:
        super().__init__()
        patch = config.patch_size
        self.proj = nn.Conv2d(config.in_channels, config.embed_dim, kernel_size=patch, stride=patch)
        self.norm = nn.LayerNorm(config.embed_dim) if config.patch_norm else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        x = self.proj(images)
        patches: Tensor = self.norm(x.permute(0, 2, 3, 1))
        return patches


class Stage(nn.Module):
    """Blocks at one resolution, then (but in the last stage) a patch merging that halves it."""

    def __init__(
        self,
        config: SwinConfig,
        stage: int,
        feature_map: Pair,
        attention: Attention,
        pad_order: PadOrder,
    ) -> None:
        super().__init__()
        block = BlockV1 if config.version == 1 else BlockV2
        self.grid = WindowGrid(config, stage, feature_map, pad_order)
        self.blocks = nn.ModuleList(
            block(config, plan, self.grid, attention) for plan in plan_blocks(config, stage)
        )
        is_last = stage == len(config.depths) - 1
        merging = None if is_last else PatchMerging(config.embed_dim << stage, config.version)
        self.downsample = merging

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.grid)
        if self.downsample is not None:
            x = self.downsample(x)
        return x


class WindowGrid(nn.Module):
    """How a stage's feature map is cut into windows, and what all its blocks share.

    The window is clamped to the feature map on each axis, and an axis that it covers is not
    shifted. A feature map that the window does not divide is padded with zeros at the bottom and on
    the right, and attention sees the padding, as it does in the other libraries. All pairs are
    (height, width) in tokens, `counts` in windows.
    """

    relative_position_index: Tensor  # [N * N]: for each pair, its row in the table of biases
    shift_mask: Tensor | None  # [nW, 1, N, N]: MASKED where a shifted window joins strangers
    relative_coordinates: Tensor | None  # version 2: [(2h - 1) * (2w - 1), 2], log-spaced

    def __init__(
        self, config: SwinConfig, stage: int, feature_map: Pair, pad_order: PadOrder
    ) -> None:
        super().__init__()
        side = config.windows[stage]
        (rows, columns), self.feature_map = feature_map, feature_map
        height, width = self.window = min(rows, side), min(columns, side)
        self.shift = (side // 2 if rows > height else 0, side // 2 if columns > width else 0)
        self.padding = (-rows % height, -columns % width)
        self.counts = (-(-rows // height), -(-columns // width))
        self.has_shift, self.has_padding = any(self.shift), any(self.padding)
        self.num_windows, self.num_tokens = self.counts[0] * self.counts[1], height * width
        self.num_positions = (2 * height - 1) * (2 * width - 1)
        self.pad_first = pad_order == "before-shift"

        index = relative_position_index(self.window)
        self.register_buffer("relative_position_index", index, persistent=False)
        mask = shift_mask(self.counts, self.window, self.shift) if self.has_shift else None
        self.register_buffer("shift_mask", mask, persistent=False)
        coordinates = None
        if config.version == 2:
            coordinates = relative_coordinates(self.window, config.pretrained_windows[stage])
        self.register_buffer("relative_coordinates", coordinates, persistent=False)

    def partition(self, x: Tensor, shifted: bool) -> Tensor:
        """[B, H, W, C] to windows [B * nW, N, 1, C], or, shifted, side by side: [B, N, nW, C]."""
        if self.pad_first:
            x = self.pad(x)
        if shifted:
            x = x.roll((-self.shift[0], -self.shift[1]), dims=(1, 2))
        if not self.pad_first:
            x = self.pad(x)
        batch, _, _, channels = x.shape
        (rows, columns), (height, width) = self.counts, self.window
        x = x.view(batch, rows, height, columns, width, channels)
        if shifted:
            x = x.permute(0, 2, 4, 1, 3, 5)
            return x.reshape(batch, self.num_tokens, self.num_windows, channels)
        x = x.permute(0, 1, 3, 2, 4, 5)
        return x.reshape(batch * self.num_windows, self.num_tokens, 1, channels)

    def merge(self, x: Tensor, shifted: bool) -> Tensor:
        """The way back from `partition`: [B, H, W, C]."""
        channels = x.shape[-1]
        (rows, columns), (height, width) = self.counts, self.window
        if shifted:
            x = x.view(-1, height, width, rows, columns, channels)
            x = x.permute(0, 3, 1, 4, 2, 5)
        else:
            x = x.view(-1, rows, columns, height, width, channels)
            x = x.permute(0, 1, 3, 2, 4, 5)
        x = x.reshape(-1, rows * height, columns * width, channels)
        if not self.pad_first:
            x = self.crop(x)
        if shifted:
            x = x.roll(self.shift, dims=(1, 2))
        if self.pad_first:
            x = self.crop(x)
        return x

    def pad(self, x: Tensor) -> Tensor:
        if self.has_padding:
            x = F.pad(x, (0, 0, 0, self.padding[1], 0, self.padding[0]))
        return x

    def crop(self, x: Tensor) -> Tensor:
        if self.has_padding:
            x = x[:, : self.feature_map[0], : self.feature_map[1]].contiguous()
        return x


def relative_position_index(window: Pair) -> Tensor:
    """For each pair of a window's tokens, the row of their offset in the table of biases: [N * N].

    The table counts offsets (Δrow, Δcolumn) from (-(height - 1), -(width - 1)), row by row.
    """
    height, width = window
    rows = torch.arange(height).repeat_interleave(width)
    columns = torch.arange(width).repeat(height)
    row_offsets = rows[:, None] - rows[None, :] + height - 1
    column_offsets = columns[:, None] - columns[None, :] + width - 1
    return (row_offsets * (2 * width - 1) + column_offsets).flatten()


def relative_coordinates(window: Pair, pretrained_side: int) -> Tensor:
    """Version 2's log-spaced offsets, in the order of the bias table: [(2h - 1) * (2w - 1), 2].

    Δ is scaled so that the (pre-training) window's edge is 8, then sign(Δ) · log2(|Δ| + 1) / log2 8
    (arXiv 2111.09883, equation 4, with the authors' normalisation).
    """
    axes = []
    for side in window:
        edge = max((pretrained_side or side) - 1, 1)
        axes.append(torch.arange(1 - side, side, dtype=torch.float32) * (8.0 / edge))
    offsets = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 1)
    return offsets.sign() * torch.log2(offsets.abs() + 1.0) / math.log2(8.0)


def shift_mask(counts: Pair, window: Pair, shift: Pair) -> Tensor:
    """The mask [nW,1,N,N] that a shifted feature map adds to the scores: 0 within a region, MASKED
    across regions.

    After the shift the last window of an axis holds two strips that were not neighbours.
    """
    regions = []
    for count, side, step in zip(counts, window, shift, strict=True):
        place = torch.arange(count * side)
        if step == 0:
            regions.append(torch.zeros_like(place))
        else:
            length = count * side
            regions.append((place >= length - side).long() + (place >= length - step).long())
    region = regions[0][:, None] * 3 + regions[1][None, :]
    region = region.view(counts[0], window[0], counts[1], window[1])
    region = region.permute(0, 2, 1, 3).reshape(counts[0] * counts[1], window[0] * window[1])
    is_across = region[:, :, None] != region[:, None, :]
    return (is_across.float() * MASKED).unsqueeze(1)


class WindowAttention(nn.Module):
    """The part that the attentions of both versions share."""

    def __init__(
        self, config: SwinConfig, plan: BlockPlan, grid: WindowGrid, attention: Attention
    ) -> None:
        super().__init__()
        self.num_heads = plan.heads
        self.dropout = config.attn_drop_rate
        self.attend = ATTENTION[attention]


class WindowAttentionV1(WindowAttention):
    """Scaled dot-product attention in windows, with a learned bias for each relative position."""

    def __init__(
        self, config: SwinConfig, plan: BlockPlan, grid: WindowGrid, attention: Attention
    ) -> None:
        super().__init__(config, plan, grid, attention)
        channels = plan.channels
        self.scale = (channels // plan.heads) ** -0.5
        self.relative_position_bias_table = nn.Parameter(
            torch.zeros(grid.num_positions, plan.heads)
        )
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)
        self.qkv = nn.Linear(channels, 3 * channels, bias=config.qkv_bias)
        self.proj = nn.Linear(channels, channels)
        self.proj_drop = nn.Dropout(config.drop_rate)

    def forward(self, x: Tensor, grid: WindowGrid, mask: Tensor | None) -> Tensor:
        """[G, N, S, C] to the same."""
        q, k, v = split_heads(self.qkv(x), self.num_heads)
        bias = spread_bias(self.relative_position_bias_table, grid)
        if mask is not None:
            bias = bias + mask
        x = self.attend(q, k, v, bias, self.scale, self.dropout if self.training else 0.0)
        out: Tensor = self.proj_drop(self.proj(x))
        return out


class WindowAttentionV2(WindowAttention):
    """Cosine attention in windows with a learned temperature and a continuous position bias."""

    k_bias: Tensor | None

    def __init__(
        self, config: SwinConfig, plan: BlockPlan, grid: WindowGrid, attention: Attention
    ) -> None:
        super().__init__(config, plan, grid, attention)
        channels = plan.channels
        self.logit_scale = nn.Parameter(torch.full((self.num_heads, 1, 1), math.log(10.0)))
        self.cpb_mlp = nn.Sequential(
            nn.Linear(2, CPB_HIDDEN),
            nn.ReLU(inplace=True),
            nn.Linear(CPB_HIDDEN, self.num_heads, bias=False),
        )
        self.qkv = nn.Linear(channels, 3 * channels, bias=False)
        has_bias = config.qkv_bias
        self.q_bias = nn.Parameter(torch.zeros(channels)) if has_bias else None
        self.v_bias = nn.Parameter(torch.zeros(channels)) if has_bias else None
        self.register_buffer("k_bias", torch.zeros(channels) if has_bias else None, False)
        self.proj = nn.Linear(channels, channels)
        self.proj_drop = nn.Dropout(config.drop_rate)

    def forward(self, x: Tensor, grid: WindowGrid, mask: Tensor | None) -> Tensor:
        """[G, N, S, C] to the same."""
        qkv_bias = None
        if self.q_bias is not None and self.k_bias is not None and self.v_bias is not None:
            qkv_bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
        q, k, v = split_heads(F.linear(x, self.qkv.weight, qkv_bias), self.num_heads)
        q = q * (self.logit_scale.clamp(max=MAX_LOGIT_SCALE).exp() * inverse_norm(q))
        k = k * inverse_norm(k)
        table = BIAS_CEILING * torch.sigmoid(self.cpb_mlp(grid.relative_coordinates))
        bias = spread_bias(table, grid)
        if mask is not None:
            bias = bias + mask
        x = self.attend(q, k, v, bias, 1.0, self.dropout if self.training else 0.0)
        out: Tensor = self.proj_drop(self.proj(x))
        return out


def split_heads(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """[G, N, S, 3C] to q, k and v, each a view [G, S, h, N, d]."""
    groups, tokens, side_by_side, _ = qkv.shape
    q, k, v = qkv.view(groups, tokens, side_by_side, 3, num_heads, -1).unbind(3)
    return q.permute(0, 2, 3, 1, 4), k.permute(0, 2, 3, 1, 4), v.permute(0, 2, 3, 1, 4)


def spread_bias(table: Tensor, grid: WindowGrid) -> Tensor:
    """A bias for each relative position and head to one for each pair: [1, h, N, N]."""
    bias = table[grid.relative_position_index]
    bias = bias.view(grid.num_tokens, grid.num_tokens, -1)
    return bias.permute(2, 0, 1).contiguous().unsqueeze(0)


def inverse_norm(x: Tensor) -> Tensor:
    """1 / ‖x‖ over the last axis, [.., 1]; finite at 0, as in `F.normalize`."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return 1.0 / norm.clamp_min(1e-12)


def attend_eager(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, dropout: float
) -> Tensor:
    """softmax(q kᵀ + bias) v, written out: q, k, v [G, S, h, N, d], bias [S, h, N, N] or
    [1, h, N, N], to [G, N, S, C]."""
    if scale != 1.0:
        q = q * scale
    scores = q @ k.transpose(-2, -1)
    scores = scores + bias
    weights = scores.softmax(dim=-1)
    if dropout > 0.0:
        weights = F.dropout(weights, dropout)
    x = weights @ v
    return x.permute(0, 3, 1, 2, 4).flatten(3)


def attend_fused(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, dropout: float
) -> Tensor:
    """The same in one kernel where the device has it (a bias that learns leaves PyTorch the
    memory-efficient one). Windows side by side become heads: [G, S * h, N, d]."""
    groups, side_by_side, _, tokens, _ = q.shape
    q, k, v = q.flatten(1, 2), k.flatten(1, 2), v.flatten(1, 2)
    bias = bias.flatten(0, 1).unsqueeze(0)
    x = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale)
    return x.transpose(1, 2).reshape(groups, tokens, side_by_side, -1)


ATTENTION: dict[Attention, Callable[[Tensor, Tensor, Tensor, Tensor, float, float], Tensor]] = {
    "eager": attend_eager,
    "sdpa": attend_fused,
}


class Block(nn.Module):
    """Window attention and an MLP, each with a residual connection: [B, H, W, C] to the same.

    The two versions differ in where the norms stand.
    """

    attention: type[WindowAttention]

    def __init__(
        self, config: SwinConfig, plan: BlockPlan, grid: WindowGrid, attention: Attention
    ) -> None:
        super().__init__()
        self.shifted = plan.shifted and grid.has_shift
        self.norm1 = nn.LayerNorm(plan.channels)
        self.drop_path = DropPath(plan.drop_path)
        self.norm2 = nn.LayerNorm(plan.channels)
        self.mlp = Mlp(plan.channels, plan.hidden, config.drop_rate)
        self.attn = self.attention(config, plan, grid, attention)

    def attend(self, x: Tensor, grid: WindowGrid) -> Tensor:
        x = grid.partition(x, self.shifted)
        x = self.attn(x, grid, grid.shift_mask if self.shifted else None)
        return grid.merge(x, self.shifted)


class BlockV1(Block):
    attention = WindowAttentionV1

    def forward(self, x: Tensor, grid: WindowGrid) -> Tensor:
        x = x + self.drop_path(self.attend(self.norm1(x), grid))
        x = x + self.drop_path(self.mlp(self.norm2(x)))
        return x  # noqa: RET504


class BlockV2(Block):
    attention = WindowAttentionV2

    def __init__(
        self, config: SwinConfig, plan: BlockPlan, grid: WindowGrid, attention: Attention
    ) -> None:
        super().__init__(config, plan, grid, attention)
        # Each residual branch begins as zero, as the authors' code has it.
        nn.init.zeros_(self.norm1.weight)
        nn.init.zeros_(self.norm2.weight)

    def forward(self, x: Tensor, grid: WindowGrid) -> Tensor:
        x = x + self.drop_path(self.norm1(self.attend(x, grid)))
        x = x + self.drop_path(self.norm2(self.mlp(x)))
        return x  # noqa: RET504


class Mlp(nn.Module):
    def __init__(self, channels: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(channels, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, channels)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        x = self.act(x)
        x = self.drop(x)
        x = self.fc2(x)
        out: Tensor = self.drop(x)
        return out


class DropPath(nn.Module):
    """In training, a residual branch is left out for a whole image with probability `rate`."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if self.rate == 0.0 or not self.training:
            return x
        keep = 1.0 - self.rate
        scale = x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(keep).div_(keep)
        return x * scale


class PatchMerging(nn.Module):
    """[B, H, W, C] to [B, ⌈H/2⌉, ⌈W/2⌉, 2C]; version 2 norms after the reduction."""

    def __init__(self, channels: int, version: int) -> None:
        super().__init__()
        self.version = version
        self.reduction = nn.Linear(4 * channels, 2 * channels, bias=False)
        self.norm = nn.LayerNorm(4 * channels if version == 1 else 2 * channels)

    def forward(self, x: Tensor) -> Tensor:
        _, height, width, _ = x.shape
        if height % 2 or width % 2:
            x = F.pad(x, (0, 0, 0, width % 2, 0, height % 2))
        batch, height, width, channels = x.shape
        x = x.view(batch, height // 2, 2, width // 2, 2, channels)
        x = x.permute(0, 1, 3, 4, 2, 5).flatten(3)
        first, second = (
            (self.norm, self.reduction) if self.version == 1 else (self.reduction, self.norm)
        )
        merged: Tensor = second(first(x))
        return merged


def initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
