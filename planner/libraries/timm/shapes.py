"""timm's Swin Transformer on shapes (timm/models/swin_transformer.py, 1.0.31).

To be laid beside that file: same classes, same order of operations, same names for locals, since
what a local keeps alive is memory. B batch, H W feature map, C channels, nW windows an image,
N tokens a window.
"""

from __future__ import annotations

from planner.libraries.blocks import Mlp, clamped_window, crop, padding
from planner.schema import SwinConfig, TrainSetting
from planner.step.attention import scaled_dot_product_attention
from planner.step.checkpointing import checkpoint
from planner.step.matmul import matmul
from planner.step.nn import (
    Conv2d,
    Dropout,
    DropPath,
    Identity,
    LayerNorm,
    Linear,
    Module,
    Sequential,
    buffer,
)
from planner.step.normalization import softmax
from planner.step.pointwise import add, mean, scale
from planner.step.tensor import Device, Parameter, Tensor
from planner.step.views import (
    contiguous,
    expand,
    flatten,
    pad,
    permute,
    reshape,
    roll,
    take_rows,
    transpose,
    unbind,
    unsqueeze,
    view,
)

Pair = tuple[int, int]


def window_partition(x: Tensor, window: Pair) -> Tensor:
    """[B, H, W, C] to [B*nW, window, window, C]."""
    batch, height, width, channels = x.shape
    x = view(x, batch, height // window[0], window[0], width // window[1], window[1], channels)
    return view(contiguous(permute(x, 0, 1, 3, 2, 4, 5)), -1, window[0], window[1], channels)


def window_reverse(windows: Tensor, window: Pair, height: int, width: int) -> Tensor:
    """[B*nW, window, window, C] to [B, H, W, C]."""
    channels = windows.shape[-1]
    x = view(windows, -1, height // window[0], width // window[1], window[0], window[1], channels)
    return view(contiguous(permute(x, 0, 1, 3, 2, 4, 5)), -1, height, width, channels)


class WindowAttention(Module):
    """timm's WindowAttention, explicit or fused."""

    def __init__(
        self, device: Device, config: SwinConfig, dim: int, heads: int, window: Pair, fused: bool
    ) -> None:
        self.window_area = window[0] * window[1]
        self.heads = heads
        self.fused = fused
        self.attn_drop_rate = config.attn_drop_rate
        rows = (2 * window[0] - 1) * (2 * window[1] - 1)
        self.relative_position_bias_table = Parameter(device, (rows, heads))
        self.relative_position_index = buffer(device, (self.window_area, self.window_area), "int64")
        self.qkv = Linear(device, dim, dim * 3, bias=config.qkv_bias)
        self.attn_drop = Dropout(config.attn_drop_rate)
        self.proj = Linear(device, dim, dim)
        self.proj_drop = Dropout(0.0)

    def position_bias(self) -> Tensor:
        """[1, heads, N, N]."""
        area = self.window_area
        bias = view(
            take_rows(self.relative_position_bias_table, view(self.relative_position_index, -1)),
            area, area, -1,
        )  # fmt: skip
        bias = contiguous(permute(bias, 2, 0, 1))
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
                num_windows = mask.shape[0]
                attn = add(
                    view(attn, -1, num_windows, heads, area, area),
                    unsqueeze(unsqueeze(mask, 1), 0),
                )
                attn = view(attn, -1, heads, area, area)
            attn = softmax(attn)
            attn = self.attn_drop(attn)
            x = matmul(attn, v)
        x = reshape(transpose(x, 1, 2), windows, area, -1)
        x = self.proj(x)
        return self.proj_drop(x)  # type: ignore[no-any-return]


class SwinTransformerBlock(Module):
    """timm's SwinTransformerBlock."""

    def __init__(
        self,
        device: Device,
        config: SwinConfig,
        dim: int,
        heads: int,
        resolution: Pair,
        window: int,
        shifted: bool,
        drop_path: float,
        fused: bool,
    ) -> None:
        self.window, self.shift = clamped_window(resolution, window, shifted)
        self.norm1 = LayerNorm(device, dim)
        self.attn = WindowAttention(device, config, dim, heads, self.window, fused)
        self.drop_path1 = DropPath(drop_path) if drop_path > 0 else Identity()
        self.norm2 = LayerNorm(device, dim)
        self.mlp = Mlp(device, dim, int(dim * config.mlp_ratio), 0.0)
        self.drop_path2 = DropPath(drop_path) if drop_path > 0 else Identity()
        self.attn_mask: Tensor | None = None
        if any(self.shift):
            padded = [-(-r // w) for r, w in zip(resolution, self.window, strict=True)]
            area = self.window[0] * self.window[1]
            self.attn_mask = buffer(device, (padded[0] * padded[1], area, area))

    def attend(self, x: Tensor) -> Tensor:
        _, height, width, channels = x.shape
        shifted_x = roll(x) if any(self.shift) else x
        shifted_x = pad(shifted_x, padding(height, self.window[0]), padding(width, self.window[1]))
        _, padded_h, padded_w, _ = shifted_x.shape
        x_windows = window_partition(shifted_x, self.window)
        x_windows = view(x_windows, -1, self.window[0] * self.window[1], channels)
        attn_windows = self.attn(x_windows, self.attn_mask)
        attn_windows = view(attn_windows, -1, self.window[0], self.window[1], channels)
        shifted_x = window_reverse(attn_windows, self.window, padded_h, padded_w)
        shifted_x = contiguous(crop(shifted_x, height, width))
        x = roll(shifted_x) if any(self.shift) else shifted_x
        return x

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        x = add(x, self.drop_path1(self.attend(self.norm1(x))))
        x = reshape(x, batch, -1, channels)
        x = add(x, self.drop_path2(self.mlp(self.norm2(x))))
        x = reshape(x, batch, height, width, channels)
        return x


class PatchMerging(Module):
    """timm's PatchMerging."""

    def __init__(self, device: Device, dim: int, out_dim: int) -> None:
        self.norm = LayerNorm(device, 4 * dim)
        self.reduction = Linear(device, 4 * dim, out_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        x = pad(x, height % 2, width % 2)
        _, height, width, _ = x.shape
        x = reshape(x, batch, height // 2, 2, width // 2, 2, channels)
        x = flatten(permute(x, 0, 1, 3, 4, 2, 5), 3)
        x = self.norm(x)
        x = self.reduction(x)
        return x


def checkpoint_seq(blocks: Sequential, x: Tensor) -> Tensor:
    """timm's `checkpoint_seq`: its caller keeps the first block's input all the while."""
    for block in blocks.modules:
        x = checkpoint(block, x)
    return x


class SwinTransformerStage(Module):
    """timm's SwinTransformerStage: the downsampling comes first."""

    def __init__(self, downsample: Module, blocks: Sequential, checkpointing: bool) -> None:
        self.downsample = downsample
        self.blocks = blocks
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        x = self.downsample(x)
        x = checkpoint_seq(self.blocks, x) if self.checkpointing else self.blocks(x)
        return x


class PatchEmbed(Module):
    """timm's PatchEmbed with NHWC output."""

    def __init__(self, device: Device, config: SwinConfig) -> None:
        self.proj = Conv2d(device, config.in_channels, config.embed_dim, config.patch_size)
        self.norm = LayerNorm(device, config.embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x)
        x = permute(x, 0, 2, 3, 1)
        x = self.norm(x)
        return x


class Head(Module):
    """timm's ClassifierHead over NHWC: average pool, dropout, linear."""

    def __init__(self, device: Device, config: SwinConfig, dim: int) -> None:
        self.drop = Dropout(config.drop_rate)
        self.fc = Linear(device, dim, config.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = mean(x, (1, 2))
        x = self.drop(x)
        x = self.fc(x)
        return x


class SwinTransformer(Module):
    """timm's SwinTransformer."""

    def __init__(self, device: Device, config: SwinConfig, setting: TrainSetting) -> None:
        self.patch_embed = PatchEmbed(device, config)
        resolution = tuple(side // config.patch_size for side in config.image_size)
        rates = config.drop_path_rates()
        layers: list[Module] = []
        for stage, depth in enumerate(config.depths):
            dim = config.stage_channels(stage)
            downsample: Module = Identity()
            if stage > 0:
                downsample = PatchMerging(device, dim // 2, dim)
                resolution = tuple((side + 1) // 2 for side in resolution)
            blocks = [
                SwinTransformerBlock(
                    device, config, dim, config.num_heads[stage], (resolution[0], resolution[1]),
                    config.windows[stage], index % 2 == 1, rates[stage][index],
                    setting.attention == "sdpa",
                )
                for index in range(depth)
            ]  # fmt: skip
            layers.append(
                SwinTransformerStage(
                    downsample, Sequential(*blocks), setting.checkpointing == "blocks"
                )
            )
        self.layers = Sequential(*layers)
        self.norm = LayerNorm(device, config.stage_channels(config.num_stages - 1))
        self.head = Head(device, config, config.stage_channels(config.num_stages - 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        x = self.layers(x)
        x = self.norm(x)
        return self.head(x)  # type: ignore[no-any-return]
