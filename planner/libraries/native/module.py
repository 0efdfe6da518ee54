"""Our own Swin Transformer, versions 1 and 2: the field's window attention, written for training.

Legend: B batch, H × W feature map in tokens, C channels, nW windows of one image, N tokens of one
window, h heads, d channels of one head; G groups × S windows side by side = B × nW.

What is done differently from the other libraries, with the same results:
- relative-position indices, coordinates and the shift mask are made once, in `WindowGrid`, one for
  all blocks of a stage;
- a feature map that the window divides is not padded (a zero `F.pad` still copies);
- in shifted blocks the windows of an image lie side by side as further heads, so that bias + mask
  is broadcast over the batch instead of being written out for every image;
- q, k and v part before they are transposed, which spares a copy in backward;
- version 2 scales the queries, [.., N, d], and not the scores, [.., N, N], which autograd keeps.

Parameters carry the names of the original Swin checkpoints, which `checkpoints.py` loads.
Needs torch: imported only by what runs a real or a fake module.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from planner.core.schema import SwinConfig, TrainSetting
from planner.libraries.maps import BlockPlan, Pair, feature_maps, plan_blocks
from planner.libraries.native.attention import (
    Attention,
    WindowAttention,
    WindowAttentionV1,
    WindowAttentionV2,
)
from planner.libraries.native.grid import PadOrder, WindowGrid


def build(config: SwinConfig, setting: TrainSetting) -> SwinTransformer:
    """As every library's spec has it; the setting's attention is resolved (eager or sdpa)."""
    attention: Attention = "eager" if setting.attention == "eager" else "sdpa"
    return build_swin(config, attention, setting.checkpointing)


def build_swin(
    config: SwinConfig,
    attention: Attention = "sdpa",
    checkpointing: str = "none",
    pad_order: PadOrder = "before-shift",
) -> SwinTransformer:
    """The model of `config`, freshly initialised, in training mode.

    `checkpointing` is none, blocks, stages or stages:0,1. `pad_order` only matters where a feature
    map is both padded and shifted: padding comes first, as in transformers, torchvision and the
    authors' detection code; "after-shift" is timm's order. Raises UnsupportedError.
    """
    return SwinTransformer(config, attention, checkpointing, pad_order)


class SwinTransformer(nn.Module):
    """Images [B, in_channels, height, width] to logits [B, num_classes]; the size is fixed."""

    def __init__(
        self, config: SwinConfig, attention: Attention, checkpointing: str, pad_order: PadOrder
    ) -> None:
        super().__init__()
        self.image_size = config.image_size
        self.checkpoint_blocks = checkpointing == "blocks"
        self.checkpointed_stages = _checkpointed_stages(checkpointing, config.num_stages)
        self.patch_embed = PatchEmbedding(config)
        maps = feature_maps(config)
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
        channels = config.stage_channels(config.num_stages - 1)
        self.norm = nn.LayerNorm(channels)
        self.head = nn.Linear(channels, config.num_classes)
        self.apply(_initialise)

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
        for number, stage in enumerate(self.layers):
            if number in self.checkpointed_stages:
                x = checkpoint(stage, x, use_reentrant=False)
            else:
                x = stage(x, self.checkpoint_blocks)
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
        last = stage == config.num_stages - 1
        self.downsample = (
            None if last else PatchMerging(config.stage_channels(stage), config.version)
        )

    def forward(self, x: Tensor, checkpoint_blocks: bool = False) -> Tensor:
        for block in self.blocks:
            if checkpoint_blocks:
                x = checkpoint(block, x, self.grid, use_reentrant=False)
            else:
                x = block(x, self.grid)
        if self.downsample is not None:
            x = self.downsample(x)
        return x


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
        kept = x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(keep).div_(keep)
        return x * kept


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


def _checkpointed_stages(checkpointing: str, num_stages: int) -> tuple[int, ...]:
    """The stages that `checkpointing` wraps whole."""
    if checkpointing in ("none", "blocks"):
        return ()
    if checkpointing == "stages":
        return tuple(range(num_stages))
    kind, _, listed = checkpointing.partition(":")
    stages = sorted({int(stage) for stage in listed.split(",")}) if kind == "stages" else []
    if not stages or stages[-1] >= num_stages:
        raise ValueError(f"checkpointing {checkpointing!r}, of {num_stages} stages from 0 on")
    return tuple(stages)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
