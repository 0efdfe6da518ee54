"""torchvision's Swin Transformer on shapes (torchvision/models/swin_transformer.py, 0.28.0).

To be laid beside that file: same classes, same order of operations, same names for locals, since
what a local keeps alive is memory. B batch, H W feature map, C channels, nW windows an image,
N tokens a window. Version 2 is in `shapes_v2.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.core.schema import SwinConfig
from planner.libraries.blocks import Merging, four_parities
from planner.libraries.maps import BlockPlan, Pair, padding, plan_blocks
from planner.libraries.windows import (
    add_shift_mask,
    crop,
    spread_bias,
    window_partition,
    window_reverse,
)
from planner.step.masks import compare, masked_fill
from planner.step.matmul import linear, matmul
from planner.step.nn import (
    GELU,
    Conv2d,
    Dropout,
    DropPath,
    LayerNorm,
    Linear,
    Module,
    Sequential,
    buffer,
)
from planner.step.normalization import normalize, softmax
from planner.step.pointwise import add, clamp, clone, dropout, exp, mul, new_empty, scale, sub
from planner.step.pooling import adaptive_avg_pool2d
from planner.step.slices import zero_part_
from planner.step.tensor import Device, Parameter, Tensor
from planner.step.views import (
    cat,
    contiguous,
    flatten,
    pad,
    permute,
    reshape,
    roll,
    select,
    transpose,
    unsqueeze,
    view,
)


def patch_merging_pad(x: Tensor) -> Tensor:
    """[B, H, W, C] to [B, H/2, W/2, 4C]: padded to even sides, the four parities side by side."""
    _, height, width, _ = x.shape
    x = pad(x, height % 2, width % 2)
    return cat(four_parities(x), -1)


def attention_mask(x: Tensor, padded: Pair, window: Pair) -> Tensor:
    """[nW, N, N] of x's dtype, made anew in every forward of a shifted block; outside autograd."""
    height, width = padded[0] // window[0], padded[1] // window[1]
    attn_mask = new_empty(x, padded, label="aten.new_zeros")
    attn_mask = view(attn_mask, height, window[0], width, window[1])
    attn_mask = reshape(permute(attn_mask, 0, 2, 1, 3), height * width, window[0] * window[1])
    attn_mask = sub(unsqueeze(attn_mask, 1), unsqueeze(attn_mask, 2))
    attn_mask = masked_fill(
        masked_fill(attn_mask, compare(attn_mask, "aten.ne")), compare(attn_mask, "aten.eq")
    )
    return attn_mask


@dataclass(frozen=True)
class Windows:
    """A block's window side and shift, as it was built with them: the same for both sides."""

    side: int
    shift: int

    def shifts(self, padded_height: int, padded_width: int) -> Pair:
        """No shift along a side that one window covers."""
        height = self.shift if self.side < padded_height else 0
        width = self.shift if self.side < padded_width else 0
        return height, width


def shifted_window_attention(
    input_: Tensor,
    qkv_weight: Tensor,
    proj_weight: Tensor,
    relative_position_bias: Tensor,
    windows: Windows,
    heads: int,
    attention_dropout: float,
    dropout_rate: float,
    qkv_bias: Tensor | None,
    proj_bias: Tensor | None,
    logit_scale: Tensor | None = None,
) -> Tensor:
    """torchvision's function of that name: [B, H, W, C] to the same; cosine attention where there
    is a `logit_scale` [heads, 1, 1]."""
    _, height, width, channels = input_.shape
    side = windows.side
    x = pad(input_, padding(height, side), padding(width, side))
    _, pad_height, pad_width, _ = x.shape
    shift = windows.shifts(pad_height, pad_width)
    if any(shift):
        x = roll(x)
    x = view(window_partition(x, (side, side)), -1, side * side, channels)

    if logit_scale is not None and qkv_bias is not None:
        qkv_bias = zero_part_(clone(qkv_bias), channels, 2 * channels)
    qkv = linear(x, qkv_weight, qkv_bias)
    qkv = permute(reshape(qkv, x.shape[0], x.shape[1], 3, heads, channels // heads), 2, 0, 3, 1, 4)
    q, k, v = select(qkv, 0), select(qkv, 0), select(qkv, 0)
    if logit_scale is not None:
        attn = matmul(normalize(q), transpose(normalize(k), -2, -1))
        logit_scale = exp(clamp(logit_scale))
        attn = mul(attn, logit_scale)
    else:
        q = scale(q)
        attn = matmul(q, transpose(k, -2, -1))
    attn = add(attn, relative_position_bias)

    if any(shift):
        attn_mask = attention_mask(x, (pad_height, pad_width), (side, side))
        attn = add_shift_mask(attn, attn_mask)

    attn = softmax(attn)
    attn = dropout(attn, attention_dropout)
    x = reshape(transpose(matmul(attn, v), 1, 2), x.shape[0], x.shape[1], channels)
    x = linear(x, proj_weight, proj_bias)
    x = dropout(x, dropout_rate)

    x = window_reverse(x, (side, side), pad_height, pad_width)
    if any(shift):
        x = roll(x)
    x = contiguous(crop(x, height, width))
    return x


class ShiftedWindowAttention(Module):
    """torchvision's ShiftedWindowAttention."""

    logit_scale: Parameter | None = None

    def __init__(
        self, device: Device, config: SwinConfig, plan: BlockPlan, windows: Windows
    ) -> None:
        dim = plan.channels
        self.windows = windows
        self.heads = plan.heads
        self.attention_dropout = config.attn_drop_rate
        self.dropout = config.drop_rate
        self.make_position_bias(device)
        self.relative_position_index = buffer(device, (windows.side**4,), "int64")
        self.qkv = Linear(device, dim, dim * 3)
        self.proj = Linear(device, dim, dim)

    def make_position_bias(self, device: Device) -> None:
        rows = (2 * self.windows.side - 1) ** 2
        self.relative_position_bias_table = Parameter(device, (rows, self.heads))

    def get_relative_position_bias(self) -> Tensor:
        """[1, heads, N, N]."""
        table, index = self.relative_position_bias_table, self.relative_position_index
        return unsqueeze(spread_bias(table, index, self.windows.side**2), 0)

    def forward(self, x: Tensor) -> Tensor:
        relative_position_bias = self.get_relative_position_bias()
        return shifted_window_attention(
            x,
            self.qkv.weight,
            self.proj.weight,
            relative_position_bias,
            self.windows,
            self.heads,
            self.attention_dropout,
            self.dropout,
            self.qkv.bias,
            self.proj.bias,
            self.logit_scale,
        )


class Mlp(Sequential):
    """torchvision's MLP: linear, GELU, dropout, linear, dropout."""

    def __init__(self, device: Device, dim: int, hidden: int, drop_rate: float) -> None:
        super().__init__(
            Linear(device, dim, hidden),
            GELU(),
            Dropout(drop_rate),
            Linear(device, hidden, dim),
            Dropout(drop_rate),
        )


class SwinTransformerBlock(Module):
    """torchvision's SwinTransformerBlock."""

    attention: type[ShiftedWindowAttention] = ShiftedWindowAttention

    def __init__(self, device: Device, config: SwinConfig, plan: BlockPlan) -> None:
        windows = Windows(plan.window, plan.window // 2 if plan.shifted else 0)
        self.norm1 = LayerNorm(device, plan.channels)
        self.attn = self.attention(device, config, plan, windows)
        self.stochastic_depth = DropPath(plan.drop_path)
        self.norm2 = LayerNorm(device, plan.channels)
        self.mlp = Mlp(device, plan.channels, plan.hidden, config.drop_rate)

    def forward(self, x: Tensor) -> Tensor:
        x = add(x, self.stochastic_depth(self.attn(self.norm1(x))))
        x = add(x, self.stochastic_depth(self.mlp(self.norm2(x))))
        return x


class PatchMerging(Merging):
    """torchvision's PatchMerging, or PatchMergingV2."""

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(patch_merging_pad(x))


class Permute(Module):
    """torchvision's Permute."""

    def __init__(self, *dims: int) -> None:
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        return permute(x, *self.dims)


class AdaptiveAvgPool2d(Module):
    """`nn.AdaptiveAvgPool2d(1)`."""

    def forward(self, x: Tensor) -> Tensor:
        return adaptive_avg_pool2d(x)


class Flatten(Module):
    """`nn.Flatten(1)`."""

    def forward(self, x: Tensor) -> Tensor:
        return flatten(x, 1)


class SwinTransformer(Module):
    """torchvision's SwinTransformer, of the version whose block it is given."""

    def __init__(
        self, device: Device, config: SwinConfig, block: type[SwinTransformerBlock]
    ) -> None:
        dim = config.embed_dim
        layers: list[Module] = [
            Sequential(
                Conv2d(device, config.in_channels, dim, config.patch_size),
                Permute(0, 2, 3, 1),
                LayerNorm(device, dim),
            )
        ]
        for stage in range(config.num_stages):
            dim = config.stage_channels(stage)
            plans = plan_blocks(config, stage)
            layers.append(Sequential(*(block(device, config, plan) for plan in plans)))
            if stage < config.num_stages - 1:
                layers.append(PatchMerging(device, dim, config.version))
        self.features = Sequential(*layers)
        self.norm = LayerNorm(device, dim)
        self.permute = Permute(0, 3, 1, 2)
        self.avgpool = AdaptiveAvgPool2d()
        self.flatten = Flatten()
        self.head = Linear(device, dim, config.num_classes)

    def stages(self) -> list[Sequential]:
        """The blocks of each stage, without the merging after them."""
        return [layer for layer in self.features.modules[1::2] if isinstance(layer, Sequential)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = self.norm(x)
        x = self.permute(x)
        x = self.avgpool(x)
        x = self.flatten(x)
        x = self.head(x)
        return x
