"""timm's Swin Transformer V2 on shapes (timm/models/swin_transformer_v2.py, 1.0.31).

To be laid beside that file: same classes, same order of operations, same names for locals, since
what a local keeps alive is memory. Shapes as in `shapes.py`.
"""

from __future__ import annotations

from planner.libraries.blocks import Mlp, clamped_window, crop, padding
from planner.libraries.maps import CPB_HIDDEN
from planner.libraries.timm.shapes import (
    Head,
    Pair,
    PatchEmbed,
    window_partition,
    window_reverse,
)
from planner.schema import SwinConfig, TrainSetting
from planner.step.checkpointing import checkpoint
from planner.step.matmul import linear, matmul
from planner.step.nn import (
    Dropout,
    DropPath,
    Identity,
    LayerNorm,
    Linear,
    Module,
    ReLU,
    Sequential,
    buffer,
)
from planner.step.normalization import normalize, softmax
from planner.step.pointwise import add, clamp, exp, mul, scale, sigmoid
from planner.step.tensor import Device, Parameter, Tensor
from planner.step.views import (
    cat,
    contiguous,
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


class WindowAttention(Module):
    """timm's WindowAttention of version 2: cosine attention, continuous position bias."""

    def __init__(
        self, device: Device, config: SwinConfig, dim: int, heads: int, window: Pair
    ) -> None:
        self.window_area = window[0] * window[1]
        self.heads = heads
        self.logit_scale = Parameter(device, (heads, 1, 1))
        self.q_bias = Parameter(device, (dim,)) if config.qkv_bias else None
        self.k_bias = buffer(device, (dim,)) if config.qkv_bias else None
        self.v_bias = Parameter(device, (dim,)) if config.qkv_bias else None
        self.cpb_mlp = Sequential(
            Linear(device, 2, CPB_HIDDEN),
            ReLU(in_place=True),
            Linear(device, CPB_HIDDEN, heads, bias=False),
        )
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
        relative_position_bias = view(
            take_rows(relative_position_bias_table, view(self.relative_position_index, -1)),
            area, area, -1,
        )  # fmt: skip
        relative_position_bias = contiguous(permute(relative_position_bias, 2, 0, 1))
        relative_position_bias = scale(sigmoid(relative_position_bias))
        attn = add(attn, unsqueeze(relative_position_bias, 0))

        if mask is not None:
            num_win = mask.shape[0]
            attn = add(view(attn, -1, num_win, heads, area, area), unsqueeze(unsqueeze(mask, 1), 0))
            attn = view(attn, -1, heads, area, area)
        attn = softmax(attn)
        attn = self.attn_drop(attn)

        x = reshape(transpose(matmul(attn, v), 1, 2), windows, area, dim)
        x = self.proj(x)
        x = self.proj_drop(x)
        return x


class SwinTransformerV2Block(Module):
    """timm's SwinTransformerV2Block: the norms come after attention and MLP."""

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
    ) -> None:
        self.window, self.shift = clamped_window(resolution, window, shifted)
        self.attn = WindowAttention(device, config, dim, heads, self.window)
        self.norm1 = LayerNorm(device, dim)
        self.drop_path1 = DropPath(drop_path) if drop_path > 0 else Identity()
        self.mlp = Mlp(device, dim, int(dim * config.mlp_ratio), 0.0)
        self.norm2 = LayerNorm(device, dim)
        self.drop_path2 = DropPath(drop_path) if drop_path > 0 else Identity()
        self.attn_mask: Tensor | None = None
        if any(self.shift):
            counts = [-(-r // w) for r, w in zip(resolution, self.window, strict=True)]
            area = self.window[0] * self.window[1]
            self.attn_mask = buffer(device, (counts[0] * counts[1], area, area))

    def attend(self, x: Tensor) -> Tensor:
        _, height, width, channels = x.shape
        shifted_x = roll(x) if any(self.shift) else x
        shifted_x = pad(shifted_x, padding(height, self.window[0]), padding(width, self.window[1]))
        _, padded_h, padded_w, _ = shifted_x.shape

        x_windows = window_partition(shifted_x, self.window)
        x_windows = view(x_windows, -1, self.window[0] * self.window[1], channels)
        attn_mask = self.attn_mask
        attn_windows = self.attn(x_windows, attn_mask)

        attn_windows = view(attn_windows, -1, self.window[0], self.window[1], channels)
        shifted_x = window_reverse(attn_windows, self.window, padded_h, padded_w)
        shifted_x = contiguous(crop(shifted_x, height, width))
        x = roll(shifted_x) if any(self.shift) else shifted_x
        return x

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        x = add(x, self.drop_path1(self.norm1(self.attend(x))))
        x = reshape(x, batch, -1, channels)
        x = add(x, self.drop_path2(self.norm2(self.mlp(x))))
        x = reshape(x, batch, height, width, channels)
        return x


class PatchMerging(Module):
    """timm's PatchMerging of version 2: the norm comes after the reduction."""

    def __init__(self, device: Device, dim: int, out_dim: int) -> None:
        self.reduction = Linear(device, 4 * dim, out_dim, bias=False)
        self.norm = LayerNorm(device, out_dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        x = pad(x, height % 2, width % 2)
        _, height, width, _ = x.shape
        x = reshape(x, batch, height // 2, 2, width // 2, 2, channels)
        x = flatten(permute(x, 0, 1, 3, 4, 2, 5), 3)
        x = self.reduction(x)
        x = self.norm(x)
        return x


class SwinTransformerV2Stage(Module):
    """timm's SwinTransformerV2Stage: the downsampling comes first."""

    def __init__(self, downsample: Module, blocks: Sequential, checkpointing: bool) -> None:
        self.downsample = downsample
        self.blocks = blocks
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        x = self.downsample(x)
        for blk in self.blocks.modules:
            x = checkpoint(blk, x) if self.checkpointing else blk(x)
        return x


class SwinTransformerV2(Module):
    """timm's SwinTransformerV2."""

    def __init__(self, device: Device, config: SwinConfig, setting: TrainSetting) -> None:
        self.patch_embed = PatchEmbed(device, config)
        height, width = (side // config.patch_size for side in config.image_size)
        rates = config.drop_path_rates()
        layers: list[Module] = []
        for stage, depth in enumerate(config.depths):
            dim = config.stage_channels(stage)
            downsample: Module = Identity()
            if stage > 0:
                downsample = PatchMerging(device, dim // 2, dim)
                height, width = (height + 1) // 2, (width + 1) // 2
            blocks = [
                SwinTransformerV2Block(
                    device, config, dim, config.num_heads[stage], (height, width),
                    config.windows[stage], index % 2 == 1, rates[stage][index],
                )
                for index in range(depth)
            ]  # fmt: skip
            layers.append(
                SwinTransformerV2Stage(
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
