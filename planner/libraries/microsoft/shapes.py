"""The authors' own Swin Transformer on shapes (github.com/microsoft/Swin-Transformer, f82860b,
models/swin_transformer.py).

Read it beside that file: it has the same classes, order of operations and names of locals, since a
tensor lives as long as a local refers to it. B batch, H W feature map, L = H*W tokens, C channels,
nW windows per image, N tokens per window. Without their optional fused window kernel.
"""

from math import prod

from planner.core.schema import ResolvedSetting, SwinConfig, TrainSetting
from planner.libraries import shared
from planner.libraries.maps import BlockPlan, Pair, feature_maps, plan_blocks, select_stages
from planner.step import nn
from planner.step.engine import checkpoint_reentrantly
from planner.step.matmul import linear, matmul
from planner.step.pointwise import add, clamp, exp, mul, new_empty, scale, sigmoid
from planner.step.tensor import Device, Parameter, Tensor
from planner.step.views import (
    cat,
    flatten,
    permute,
    reshape,
    roll,
    select,
    transpose,
    unsqueeze,
    view,
)


class WindowAttention(nn.Module):
    """The authors' WindowAttention."""

    def __init__(
        self, device: Device, config: SwinConfig, plan: BlockPlan, window_size: int
    ) -> None:
        dim, heads = plan.channels, plan.heads
        area = window_size**2
        self.heads = heads
        rows = (2 * window_size - 1) ** 2
        self.relative_position_bias_table = Parameter(device, (rows, heads))
        self.relative_position_index = nn.buffer(device, (area, area), "int64")
        self.qkv = nn.Linear(device, dim, dim * 3, bias=config.qkv_bias)
        self.attn_drop = nn.Dropout(config.attn_drop_rate)
        self.proj = nn.Linear(device, dim, dim)
        self.proj_drop = nn.Dropout(config.drop_rate)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        windows, area, dim = x.shape
        heads = self.heads
        qkv = permute(reshape(self.qkv(x), windows, area, 3, heads, dim // heads), 2, 0, 3, 1, 4)
        q, k, v = select(qkv, 0), select(qkv, 0), select(qkv, 0)

        q = scale(q)
        attn = matmul(q, transpose(k, -2, -1))

        relative_position_bias = shared.spread_bias(
            self.relative_position_bias_table, self.relative_position_index, area
        )
        attn = add(attn, unsqueeze(relative_position_bias, 0))

        if mask is not None:
            attn = shared.add_shift_mask(attn, mask)
        attn = nn.softmax(attn)
        attn = self.attn_drop(attn)

        x = reshape(transpose(matmul(attn, v), 1, 2), windows, area, dim)
        x = self.proj(x)
        x = self.proj_drop(x)
        return x


class SwinTransformerBlock(nn.Module):
    """The authors' SwinTransformerBlock: a window that covers the shorter side is not shifted.

    Version 2 norms after attention and MLP.
    """

    def __init__(
        self, device: Device, config: SwinConfig, plan: BlockPlan, input_resolution: Pair
    ) -> None:
        self.version = config.version
        self.input_resolution = input_resolution
        self.window_size = min(plan.window, *input_resolution)
        is_shifted = plan.shifted and min(input_resolution) > plan.window
        self.shift_size = plan.window // 2 if is_shifted else 0
        self.norm1 = nn.LayerNorm(device, plan.channels)
        self.attn = self.make_attention(device, config, plan)
        self.drop_path = shared.drop_path_or_identity(plan.drop_path)
        self.norm2 = nn.LayerNorm(device, plan.channels)
        self.mlp = shared.Mlp(device, plan.channels, plan.hidden, config.drop_rate)
        self.attn_mask: Tensor | None = None
        if self.shift_size > 0:
            self.attn_mask = shared.shift_mask(device, input_resolution, self.window)

    @property
    def window(self) -> Pair:
        return (self.window_size, self.window_size)

    def make_attention(self, device: Device, config: SwinConfig, plan: BlockPlan) -> nn.Module:
        return WindowAttention(device, config, plan, self.window_size)

    def forward(self, x: Tensor) -> Tensor:
        height, width = self.input_resolution
        batch, _, channels = x.shape

        shortcut = x
        x = self.norm1(x) if self.version == 1 else x
        x = view(x, batch, height, width, channels)

        shifted_x = roll(x) if self.shift_size > 0 else x
        x_windows = shared.window_partition(shifted_x, self.window)
        x_windows = view(x_windows, -1, self.window_size**2, channels)
        attn_windows = self.attn(x_windows, self.attn_mask)
        attn_windows = view(attn_windows, -1, self.window_size, self.window_size, channels)
        shifted_x = shared.window_reverse(attn_windows, self.window, height, width)
        x = roll(shifted_x) if self.shift_size > 0 else shifted_x
        x = view(x, batch, height * width, channels)

        if self.version == 1:
            x = add(shortcut, self.drop_path(x))
            x = add(x, self.drop_path(self.mlp(self.norm2(x))))
        else:
            x = add(shortcut, self.drop_path(self.norm1(x)))
            x = add(x, self.drop_path(self.norm2(self.mlp(x))))
        return x


class PatchMerging(shared.Merging):
    """The authors' PatchMerging: [B, L, C] to [B, L/4, 2C]."""

    def __init__(self, device: Device, input_resolution: Pair, channels: int, version: int) -> None:
        super().__init__(device, channels, version)
        self.input_resolution = input_resolution

    def forward(self, x: Tensor) -> Tensor:
        batch, _, channels = x.shape
        x = view(x, batch, *self.input_resolution, channels)
        return self.reduce(shared.join_as_tokens(shared.split_parities(x)))


class BasicLayer(nn.Module):
    """The authors' BasicLayer: the downsampling comes last."""

    def __init__(
        self, blocks: list[nn.Module], downsample: nn.Module | None, use_checkpoint: bool
    ) -> None:
        self.blocks = blocks
        self.downsample = downsample
        self.use_checkpoint = use_checkpoint

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint_reentrantly(block, x) if self.use_checkpoint else block(x)
        if self.downsample is not None:
            x = self.downsample(x)
        return x


class PatchEmbed(nn.Module):
    """The authors' PatchEmbed: [B, in_channels, H, W] to [B, L, C]."""

    def __init__(self, device: Device, config: SwinConfig) -> None:
        self.proj = nn.Conv2d(device, config.in_channels, config.embed_dim, config.patch_size)
        self.norm = nn.LayerNorm(device, config.embed_dim) if config.patch_norm else None

    def forward(self, x: Tensor) -> Tensor:
        x = transpose(flatten(self.proj(x), 2), 1, 2)
        if self.norm is not None:
            x = self.norm(x)
        return x


class AdaptiveAvgPool1d(nn.Module):
    """`nn.AdaptiveAvgPool1d(1)`."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.adaptive_avg_pool1d(x)


class SwinTransformer(nn.Module):
    """The authors' SwinTransformer, of the version of its blocks."""

    def __init__(
        self,
        device: Device,
        config: SwinConfig,
        setting: TrainSetting,
        block: type[SwinTransformerBlock],
    ) -> None:
        self.patch_embed = PatchEmbed(device, config)
        maps = feature_maps(config)
        self.absolute_pos_embed: Parameter | None = None
        if config.absolute_position_embedding:
            shape = (1, prod(maps[0]), config.embed_dim)
            self.absolute_pos_embed = Parameter(device, shape)
        self.pos_drop = nn.Dropout(config.drop_rate)
        self.layers: list[nn.Module] = []
        for stage, sides in enumerate(maps):
            dim = config.stage_channels(stage)
            blocks: list[nn.Module] = [
                block(device, config, plan, sides) for plan in plan_blocks(config, stage)
            ]
            is_last = stage == config.num_stages - 1
            downsample = None if is_last else PatchMerging(device, sides, dim, config.version)
            self.layers.append(BasicLayer(blocks, downsample, setting.checkpointing == "blocks"))
        self.norm = nn.LayerNorm(device, dim)
        self.avgpool = AdaptiveAvgPool1d()
        self.head = nn.Linear(device, dim, config.num_classes)

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        if self.absolute_pos_embed is not None:
            x = add(x, self.absolute_pos_embed)
        x = self.pos_drop(x)

        for layer in self.layers:
            x = layer(x)

        x = self.norm(x)
        x = self.avgpool(transpose(x, 1, 2))
        x = flatten(x, 1)
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.forward_features(x)
        x = self.head(x)
        return x


# The parts of the authors' Swin Transformer V2 that differ, on shapes (f82860b,
# models/swin_transformer_v2.py). Legend as above.


class WindowAttentionV2(nn.Module):
    """The authors' WindowAttention of version 2: cosine attention, continuous position bias."""

    def __init__(
        self, device: Device, config: SwinConfig, plan: BlockPlan, window_size: int
    ) -> None:
        dim, heads = plan.channels, plan.heads
        area = window_size**2
        self.heads = heads
        self.logit_scale = Parameter(device, (heads, 1, 1))
        self.cpb_mlp = shared.position_bias_mlp(device, heads)
        sides = 2 * window_size - 1
        self.relative_coords_table = nn.buffer(device, (1, sides, sides, 2))
        self.relative_position_index = nn.buffer(device, (area, area), "int64")
        self.qkv = nn.Linear(device, dim, dim * 3, bias=False)
        self.q_bias = Parameter(device, (dim,)) if config.qkv_bias else None
        self.v_bias = Parameter(device, (dim,)) if config.qkv_bias else None
        self.attn_drop = nn.Dropout(config.attn_drop_rate)
        self.proj = nn.Linear(device, dim, dim)
        self.proj_drop = nn.Dropout(config.drop_rate)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        windows, area, dim = x.shape
        heads = self.heads
        qkv_bias = None
        if self.q_bias is not None and self.v_bias is not None:
            qkv_bias = cat((self.q_bias, zeros_like(self.v_bias), self.v_bias), 0)
        qkv = linear(x, self.qkv.weight, qkv_bias)
        qkv = permute(reshape(qkv, windows, area, 3, heads, -1), 2, 0, 3, 1, 4)
        q, k, v = select(qkv, 0), select(qkv, 0), select(qkv, 0)

        attn = matmul(nn.normalize(q), transpose(nn.normalize(k), -2, -1))
        logit_scale = exp(clamp(self.logit_scale))
        attn = mul(attn, logit_scale)

        relative_position_bias_table = view(self.cpb_mlp(self.relative_coords_table), -1, heads)
        relative_position_bias = shared.spread_bias(
            relative_position_bias_table, self.relative_position_index, area
        )
        relative_position_bias = scale(sigmoid(relative_position_bias))
        attn = add(attn, unsqueeze(relative_position_bias, 0))

        if mask is not None:
            attn = shared.add_shift_mask(attn, mask)
        attn = nn.softmax(attn)
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

    def make_attention(self, device: Device, config: SwinConfig, plan: BlockPlan) -> nn.Module:
        return WindowAttentionV2(device, config, plan, self.window_size)


def build(device: Device, config: SwinConfig, setting: ResolvedSetting) -> nn.Module:
    """The authors' SwinTransformer or SwinTransformerV2, checkpointed as `spec.py` does it."""
    block = SwinTransformerBlock if config.version == 1 else SwinTransformerBlockV2
    model = SwinTransformer(device, config, setting, block)
    if setting.checkpointing.startswith("stages"):
        shared.checkpoint_in_place(select_stages(model.layers, setting))
    return model
