"""timm's Swin Transformer on shapes (timm/models/swin_transformer.py, 1.0.31).

Read it beside that file: it has the same classes, order of operations and names of locals, since a
tensor lives as long as a local refers to it. B batch, H W feature map, C channels, nW windows per
image, N tokens per window.
"""

from planner.core.schema import ResolvedSetting, SwinConfig, TrainSetting
from planner.libraries import shared
from planner.libraries.maps import (
    BlockPlan,
    Pair,
    clamped_window,
    feature_maps,
    padding,
    plan_blocks,
    select_stages,
)
from planner.step import nn
from planner.step.engine import checkpoint
from planner.step.matmul import linear, matmul, scaled_dot_product_attention
from planner.step.pointwise import add, clamp, contiguous, exp, mean, mul, scale, sigmoid
from planner.step.tensor import Device, Parameter, Tensor
from planner.step.views import (
    cat,
    expand,
    pad,
    permute,
    reshape,
    roll,
    transpose,
    unbind,
    unsqueeze,
    view,
)


class WindowAttention(nn.Module):
    """timm's WindowAttention, explicit or fused."""

    def __init__(
        self, device: Device, config: SwinConfig, plan: BlockPlan, window: Pair, fused: bool
    ) -> None:
        dim = plan.channels
        self.window_area = window[0] * window[1]
        self.heads = plan.heads
        self.fused = fused
        self.attn_drop_rate = config.attn_drop_rate
        rows = (2 * window[0] - 1) * (2 * window[1] - 1)
        self.relative_position_bias_table = Parameter(device, (rows, plan.heads))
        self.relative_position_index = nn.buffer(
            device, (self.window_area, self.window_area), "int64"
        )
        self.qkv = nn.Linear(device, dim, dim * 3, bias=config.qkv_bias)
        self.attn_drop = nn.Dropout(config.attn_drop_rate)
        self.proj = nn.Linear(device, dim, dim)
        self.proj_drop = nn.Dropout(0.0)

    def position_bias(self) -> Tensor:
        """[1, heads, N, N]."""
        bias = shared.spread_bias(
            self.relative_position_bias_table, self.relative_position_index, self.window_area
        )
        return unsqueeze(bias, 0)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        windows, area, dim = x.shape
        heads = self.heads
        qkv = permute(reshape(self.qkv(x), windows, area, 3, heads, dim // heads), 2, 0, 3, 1, 4)
        q, k, v = unbind(qkv, 0)
        if self.fused:
            attn_mask = self.position_bias()
            if mask is not None:
                num_windows = mask.shape[0]
                mask = expand(
                    view(mask, 1, num_windows, 1, area, area),
                    windows // num_windows, -1, heads, -1, -1,
                )  # fmt: skip
                attn_mask = add(attn_mask, reshape(mask, -1, heads, area, area))
            x = scaled_dot_product_attention(q, k, v, attn_mask, self.attn_drop_rate)
        else:
            q = scale(q)
            attn = matmul(q, transpose(k, -2, -1))
            attn = add(attn, self.position_bias())
            if mask is not None:
                attn = shared.add_shift_mask(attn, mask)
            attn = nn.softmax(attn)
            attn = self.attn_drop(attn)
            x = matmul(attn, v)
        x = reshape(transpose(x, 1, 2), windows, area, -1)
        x = self.proj(x)
        return self.proj_drop(x)  # type: ignore[no-any-return]


class SwinTransformerBlock(nn.Module):
    """timm's SwinTransformerBlock."""

    attn: nn.Module

    def __init__(
        self, device: Device, config: SwinConfig, plan: BlockPlan, resolution: Pair, fused: bool
    ) -> None:
        self.window, self.shift = clamped_window(resolution, plan.window, plan.shifted)
        self.norm1 = nn.LayerNorm(device, plan.channels)
        self.attn = WindowAttention(device, config, plan, self.window, fused)
        self.drop_path1 = shared.drop_path_or_identity(plan.drop_path)
        self.norm2 = nn.LayerNorm(device, plan.channels)
        self.mlp = shared.Mlp(device, plan.channels, plan.hidden, 0.0)
        self.drop_path2 = shared.drop_path_or_identity(plan.drop_path)
        self.attn_mask = (
            shared.shift_mask(device, resolution, self.window) if any(self.shift) else None
        )

    def attend(self, x: Tensor) -> Tensor:
        _, height, width, channels = x.shape
        shifted_x = roll(x) if any(self.shift) else x
        shifted_x = pad(shifted_x, padding(height, self.window[0]), padding(width, self.window[1]))
        _, padded_h, padded_w, _ = shifted_x.shape
        x_windows = shared.window_partition(shifted_x, self.window)
        x_windows = view(x_windows, -1, self.window[0] * self.window[1], channels)
        attn_windows = self.attn(x_windows, self.attn_mask)
        attn_windows = view(attn_windows, -1, self.window[0], self.window[1], channels)
        shifted_x = shared.window_reverse(attn_windows, self.window, padded_h, padded_w)
        shifted_x = contiguous(shared.crop(shifted_x, height, width))
        x = roll(shifted_x) if any(self.shift) else shifted_x
        return x

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        x = add(x, self.drop_path1(self.attend(self.norm1(x))))
        x = reshape(x, batch, -1, channels)
        x = add(x, self.drop_path2(self.mlp(self.norm2(x))))
        x = reshape(x, batch, height, width, channels)
        return x


class PatchMerging(nn.Module):
    """timm's PatchMerging."""

    def __init__(self, device: Device, dim: int, out_dim: int) -> None:
        self.norm = nn.LayerNorm(device, 4 * dim)
        self.reduction = nn.Linear(device, 4 * dim, out_dim, bias=False)

    def gather(self, x: Tensor) -> Tensor:
        """[B, H, W, C] to [B, H/2, W/2, 4C], rounded up."""
        _, height, width, _ = x.shape
        return shared.fold_parities(pad(x, height % 2, width % 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.gather(x)
        x = self.norm(x)
        x = self.reduction(x)
        return x


def checkpoint_seq(blocks: nn.Sequential, x: Tensor) -> Tensor:
    """timm's `checkpoint_seq`: its caller refers to the first block's input until it returns."""
    for block in blocks.modules:
        x = checkpoint(block, x)
    return x


class SwinTransformerStage(nn.Module):
    """timm's SwinTransformerStage: the downsampling comes first."""

    def __init__(self, downsample: nn.Module, blocks: nn.Sequential, checkpointing: bool) -> None:
        self.downsample = downsample
        self.blocks = blocks
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        x = self.downsample(x)
        x = checkpoint_seq(self.blocks, x) if self.checkpointing else self.blocks(x)
        return x


class Head(nn.Module):
    """timm's ClassifierHead over NHWC: average pool, dropout, linear."""

    def __init__(self, device: Device, config: SwinConfig, dim: int) -> None:
        self.drop = nn.Dropout(config.drop_rate)
        self.fc = nn.Linear(device, dim, config.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = mean(x, (1, 2))
        x = self.drop(x)
        x = self.fc(x)
        return x


class SwinTransformer(nn.Module):
    """timm's SwinTransformer. That of version 2 has other blocks, mergings and stages."""

    block: type[SwinTransformerBlock] = SwinTransformerBlock
    merging: type[PatchMerging] = PatchMerging
    stage: type[SwinTransformerStage] = SwinTransformerStage

    def __init__(self, device: Device, config: SwinConfig, setting: TrainSetting) -> None:
        self.patch_embed = shared.PatchEmbed(device, config)
        fused = setting.attention == "sdpa"
        layers: list[nn.Module] = []
        for stage, resolution in enumerate(feature_maps(config)):
            dim = config.stage_channels(stage)
            downsample = self.merging(device, dim // 2, dim) if stage > 0 else nn.Identity()
            blocks = [
                self.block(device, config, plan, resolution, fused)
                for plan in plan_blocks(config, stage)
            ]
            layers.append(
                self.stage(downsample, nn.Sequential(*blocks), setting.checkpointing == "blocks")
            )
        self.layers = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(device, dim)
        self.head = Head(device, config, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        x = self.layers(x)
        x = self.norm(x)
        return self.head(x)  # type: ignore[no-any-return]


# timm's Swin Transformer V2 on shapes (timm/models/swin_transformer_v2.py, 1.0.31).
#
# Read it beside that file, as above: it has the same classes, order of operations and names of
# locals.


class WindowAttentionV2(nn.Module):
    """timm's WindowAttention of version 2: cosine attention, continuous position bias."""

    def __init__(self, device: Device, config: SwinConfig, plan: BlockPlan, window: Pair) -> None:
        dim, heads = plan.channels, plan.heads
        self.window_area = window[0] * window[1]
        self.heads = heads
        self.logit_scale = Parameter(device, (heads, 1, 1))
        self.q_bias = Parameter(device, (dim,)) if config.qkv_bias else None
        self.k_bias = nn.buffer(device, (dim,)) if config.qkv_bias else None
        self.v_bias = Parameter(device, (dim,)) if config.qkv_bias else None
        self.cpb_mlp = shared.position_bias_mlp(device, heads)
        self.qkv = nn.Linear(device, dim, dim * 3, bias=False)
        self.attn_drop = nn.Dropout(config.attn_drop_rate)
        self.proj = nn.Linear(device, dim, dim)
        self.proj_drop = nn.Dropout(0.0)
        table = (1, 2 * window[0] - 1, 2 * window[1] - 1, 2)
        self.relative_coords_table = nn.buffer(device, table)
        self.relative_position_index = nn.buffer(
            device, (self.window_area, self.window_area), "int64"
        )

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


class SwinTransformerV2Block(SwinTransformerBlock):
    """timm's SwinTransformerV2Block: the norms come after attention and MLP, and
    attention is never fused."""

    def __init__(
        self, device: Device, config: SwinConfig, plan: BlockPlan, resolution: Pair, fused: bool
    ) -> None:
        self.window, self.shift = clamped_window(resolution, plan.window, plan.shifted)
        self.attn = WindowAttentionV2(device, config, plan, self.window)
        self.norm1 = nn.LayerNorm(device, plan.channels)
        self.drop_path1 = shared.drop_path_or_identity(plan.drop_path)
        self.mlp = shared.Mlp(device, plan.channels, plan.hidden, 0.0)
        self.norm2 = nn.LayerNorm(device, plan.channels)
        self.drop_path2 = shared.drop_path_or_identity(plan.drop_path)
        self.attn_mask = (
            shared.shift_mask(device, resolution, self.window) if any(self.shift) else None
        )

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
        self.reduction = nn.Linear(device, 4 * dim, out_dim, bias=False)
        self.norm = nn.LayerNorm(device, out_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gather(x)
        x = self.reduction(x)
        x = self.norm(x)
        return x


class SwinTransformerV2Stage(SwinTransformerStage):
    """timm's SwinTransformerV2Stage: nothing refers to its first block's input."""

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


def build(device: Device, config: SwinConfig, setting: ResolvedSetting) -> nn.Module:
    """timm's SwinTransformer or SwinTransformerV2, checkpointed as `spec.py` does it."""
    kind = SwinTransformer if config.version == 1 else SwinTransformerV2
    model = kind(device, config, setting)
    if setting.checkpointing.startswith("stages"):
        shared.checkpoint_in_place(select_stages(model.layers.modules, setting))
    return model
