"""The authors' own Swin Transformer on shapes (github.com/microsoft/Swin-Transformer, f82860b,
models/swin_transformer.py).

To be laid beside that file: same classes, same order of operations, same names for locals, since
what a local keeps alive is memory. B batch, H W feature map, L = H*W tokens, C channels, nW windows
an image, N tokens a window. Without their optional fused window kernel. Version 2 is in
`shapes_v2.py`.
"""

from __future__ import annotations

from planner.libraries.blocks import Mlp
from planner.schema import SwinConfig, TrainSetting
from planner.step.matmul import matmul
from planner.step.nn import (
    Conv2d,
    Dropout,
    DropPath,
    Identity,
    LayerNorm,
    Linear,
    Module,
    buffer,
)
from planner.step.normalization import softmax
from planner.step.pointwise import add, scale
from planner.step.pooling import adaptive_avg_pool1d
from planner.step.reentrant import checkpoint_reentrantly
from planner.step.tensor import Device, Parameter, Tensor
from planner.step.views import (
    cat,
    contiguous,
    flatten,
    permute,
    reshape,
    roll,
    select,
    slice_,
    take_rows,
    transpose,
    unsqueeze,
    view,
)

Pair = tuple[int, int]


def window_partition(x: Tensor, window_size: int) -> Tensor:
    """[B, H, W, C] to [B*nW, window, window, C]."""
    batch, height, width, channels = x.shape
    x = view(
        x, batch, height // window_size, window_size, width // window_size, window_size, channels
    )
    windows = view(contiguous(permute(x, 0, 1, 3, 2, 4, 5)), -1, window_size, window_size, channels)
    return windows


def window_reverse(windows: Tensor, window_size: int, height: int, width: int) -> Tensor:
    """[B*nW, window, window, C] to [B, H, W, C]."""
    channels = windows.shape[-1]
    x = view(
        windows, -1, height // window_size, width // window_size, window_size, window_size, channels
    )
    x = view(contiguous(permute(x, 0, 1, 3, 2, 4, 5)), -1, height, width, channels)
    return x


class WindowAttention(Module):
    """The authors' WindowAttention."""

    def __init__(
        self, device: Device, config: SwinConfig, dim: int, heads: int, window_size: int
    ) -> None:
        self.area = window_size**2
        self.heads = heads
        rows = (2 * window_size - 1) ** 2
        self.relative_position_bias_table = Parameter(device, (rows, heads))
        self.relative_position_index = buffer(device, (self.area, self.area), "int64")
        self.qkv = Linear(device, dim, dim * 3, bias=config.qkv_bias)
        self.attn_drop = Dropout(config.attn_drop_rate)
        self.proj = Linear(device, dim, dim)
        self.proj_drop = Dropout(config.drop_rate)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        windows, area, dim = x.shape
        heads = self.heads
        qkv = permute(reshape(self.qkv(x), windows, area, 3, heads, dim // heads), 2, 0, 3, 1, 4)
        q, k, v = select(qkv, 0), select(qkv, 0), select(qkv, 0)

        q = scale(q)
        attn = matmul(q, transpose(k, -2, -1))

        relative_position_bias = view(
            take_rows(self.relative_position_bias_table, view(self.relative_position_index, -1)),
            area, area, -1,
        )  # fmt: skip
        relative_position_bias = contiguous(permute(relative_position_bias, 2, 0, 1))
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


class SwinTransformerBlock(Module):
    """The authors' SwinTransformerBlock: a window that covers the shorter side is not shifted."""

    def __init__(
        self,
        device: Device,
        config: SwinConfig,
        dim: int,
        input_resolution: Pair,
        heads: int,
        window_size: int,
        shift_size: int,
        drop_path: float,
    ) -> None:
        self.input_resolution = input_resolution
        self.window_size = window_size
        self.shift_size = shift_size
        if min(input_resolution) <= window_size:
            self.shift_size = 0
            self.window_size = min(input_resolution)
        self.norm1 = LayerNorm(device, dim)
        self.attn = self.make_attention(device, config, dim, heads)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else Identity()
        self.norm2 = LayerNorm(device, dim)
        self.mlp = Mlp(device, dim, int(dim * config.mlp_ratio), config.drop_rate)
        self.attn_mask: Tensor | None = None
        if self.shift_size > 0:
            height, width = input_resolution
            area = self.window_size**2
            self.attn_mask = buffer(device, (height * width // area, area, area))

    def make_attention(self, device: Device, config: SwinConfig, dim: int, heads: int) -> Module:
        return WindowAttention(device, config, dim, heads, self.window_size)

    def forward(self, x: Tensor) -> Tensor:
        height, width = self.input_resolution
        batch, _, channels = x.shape

        shortcut = x
        x = self.norm1(x)
        x = view(x, batch, height, width, channels)

        if self.shift_size > 0:
            shifted_x = roll(x)
            x_windows = window_partition(shifted_x, self.window_size)
        else:
            shifted_x = x
            x_windows = window_partition(shifted_x, self.window_size)

        x_windows = view(x_windows, -1, self.window_size**2, channels)
        attn_windows = self.attn(x_windows, self.attn_mask)
        attn_windows = view(attn_windows, -1, self.window_size, self.window_size, channels)

        if self.shift_size > 0:
            shifted_x = window_reverse(attn_windows, self.window_size, height, width)
            x = roll(shifted_x)
        else:
            shifted_x = window_reverse(attn_windows, self.window_size, height, width)
            x = shifted_x
        x = view(x, batch, height * width, channels)
        x = add(shortcut, self.drop_path(x))

        x = add(x, self.drop_path(self.mlp(self.norm2(x))))
        return x


class PatchMerging(Module):
    """The authors' PatchMerging: norm of the four parities, then the reduction."""

    def __init__(self, device: Device, input_resolution: Pair, dim: int) -> None:
        self.input_resolution = input_resolution
        self.reduction = Linear(device, 4 * dim, 2 * dim, bias=False)
        self.norm = LayerNorm(device, 4 * dim)

    def gather(self, x: Tensor) -> Tensor:
        """[B, L, C] to [B, L/4, 4C]."""
        height, width = self.input_resolution
        batch, _, channels = x.shape

        x = view(x, batch, height, width, channels)
        x0 = slice_(slice_(x, 1, 0, height, 2), 2, 0, width, 2)
        x1 = slice_(slice_(x, 1, 1, height, 2), 2, 0, width, 2)
        x2 = slice_(slice_(x, 1, 0, height, 2), 2, 1, width, 2)
        x3 = slice_(slice_(x, 1, 1, height, 2), 2, 1, width, 2)
        x = cat([x0, x1, x2, x3], -1)
        x = view(x, batch, -1, 4 * channels)
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.gather(x)
        x = self.norm(x)
        x = self.reduction(x)
        return x


class BasicLayer(Module):
    """The authors' BasicLayer: the downsampling comes last."""

    def __init__(
        self, blocks: list[Module], downsample: Module | None, use_checkpoint: bool
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


class PatchEmbed(Module):
    """The authors' PatchEmbed: [B, in_channels, H, W] to [B, L, C]."""

    def __init__(self, device: Device, config: SwinConfig) -> None:
        self.proj = Conv2d(device, config.in_channels, config.embed_dim, config.patch_size)
        self.norm = LayerNorm(device, config.embed_dim) if config.patch_norm else None

    def forward(self, x: Tensor) -> Tensor:
        x = transpose(flatten(self.proj(x), 2), 1, 2)
        if self.norm is not None:
            x = self.norm(x)
        return x


class AdaptiveAvgPool1d(Module):
    """`nn.AdaptiveAvgPool1d(1)`."""

    def forward(self, x: Tensor) -> Tensor:
        return adaptive_avg_pool1d(x)


class SwinTransformer(Module):
    """The authors' SwinTransformer, of the version whose block and merging it is given."""

    def __init__(
        self,
        device: Device,
        config: SwinConfig,
        setting: TrainSetting,
        block: type[SwinTransformerBlock],
        merging: type[PatchMerging],
    ) -> None:
        self.patch_embed = PatchEmbed(device, config)
        resolution = tuple(side // config.patch_size for side in config.image_size)
        self.absolute_pos_embed: Parameter | None = None
        if config.absolute_position_embedding:
            shape = (1, resolution[0] * resolution[1], config.embed_dim)
            self.absolute_pos_embed = Parameter(device, shape)
        self.pos_drop = Dropout(config.drop_rate)
        self.layers: list[Module] = []
        rates = config.drop_path_rates()
        for stage, depth in enumerate(config.depths):
            dim = config.stage_channels(stage)
            sides = (resolution[0] >> stage, resolution[1] >> stage)
            window = config.windows[stage]
            blocks: list[Module] = [
                block(
                    device, config, dim, sides, config.num_heads[stage], window,
                    window // 2 * (index % 2), rates[stage][index],
                )
                for index in range(depth)
            ]  # fmt: skip
            is_last = stage == config.num_stages - 1
            downsample = None if is_last else merging(device, sides, dim)
            self.layers.append(BasicLayer(blocks, downsample, setting.checkpointing == "blocks"))
        self.norm = LayerNorm(device, dim)
        self.avgpool = AdaptiveAvgPool1d()
        self.head = Linear(device, dim, config.num_classes)

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
