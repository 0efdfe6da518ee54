"""Models of published rows that no library has, as their authors' code runs them: the same
operations in the same order, since memory depends on which tensors those make. C channels.

ConvNeXt is facebookresearch/ConvNeXt @06f7b05 models/convnext.py, HiViT is zhangxiaosong18/hivit
@2718339 supervised/models/hivit.py, both as MzeroMiko/VMamba @9fd253f analyze/utils.py builds them.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of [B, C, H, W], in plain operations."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class ConvNeXtBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.wide = nn.Linear(channels, 4 * channels)
        self.narrow = nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.full((channels,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        kept, x = x, self.depthwise(x)
        x = self.wide(self.norm(x.permute(0, 2, 3, 1)))
        x = functional.gelu(x)
        x = self.narrow(x)
        x = self.scale * x
        return kept + x.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self, depths: Sequence[int], channels: Sequence[int]) -> None:
        super().__init__()
        entries = [nn.Sequential(nn.Conv2d(3, channels[0], 4, 4), ChannelNorm(channels[0]))]
        for before, width in itertools.pairwise(channels):
            entries.append(nn.Sequential(ChannelNorm(before), nn.Conv2d(before, width, 2, 2)))
        self.entries = nn.ModuleList(entries)
        self.stages = nn.ModuleList(
            nn.Sequential(*[ConvNeXtBlock(width) for _ in range(depth)])
            for depth, width in zip(depths, channels, strict=True)
        )
        self.head = Head(channels[-1], (-2, -1))

    def forward(self, x: Tensor) -> Tensor:
        for entry, stage in zip(self.entries, self.stages, strict=True):
            x = entry(x)
            x = stage(x)
        return self.head(x)


class Head(nn.Module):
    """Logits of the mean over `dims`."""

    def __init__(self, channels: int, dims: Sequence[int]) -> None:
        super().__init__()
        self.dims = tuple(dims)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.classify = nn.Linear(channels, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.norm(x.mean(self.dims)))


class Residual(nn.Module):
    """What a branch makes of the normalized input, which is kept meanwhile, added to the input."""

    def __init__(self, channels: int, branch: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(self.norm(x))


def mlp(channels: int, ratio: int) -> Residual:
    wide, narrow = nn.Linear(channels, ratio * channels), nn.Linear(ratio * channels, channels)
    return Residual(channels, nn.Sequential(wide, nn.GELU(), narrow))


class BiasedAttention(nn.Module):
    """Over all tokens of an image, their positions' bias gathered from a table."""

    index: Tensor

    def __init__(self, side: int, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (channels // heads) ** -0.5
        self.table = nn.Parameter(torch.zeros((2 * side - 1) ** 2, heads))
        at = torch.arange(side * side)
        row, column = at // side, at % side
        down, across = row[:, None] - row, column[:, None] - column
        index = (down + side - 1) * (2 * side - 1) + across + side - 1
        self.register_buffer("index", index)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.project = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, channels = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, channels // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q = q * self.scale
        scores = q @ k.transpose(-2, -1)
        bias = self.table[self.index.view(-1)].view(-1, tokens, tokens, self.heads)
        bias = bias.permute(0, 3, 1, 2).contiguous()
        scores = scores + bias
        scores = scores.softmax(-1)
        mixed = (scores @ v).transpose(1, 2).reshape(batch, tokens, channels)
        return self.project(mixed)


class Merge(nn.Module):
    """Four neighbours of [B, N, S, S, C] into one of twice the channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * channels)
        self.reduce = nn.Linear(4 * channels, 2 * channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        corners = [x[..., i::2, j::2, :] for j in (0, 1) for i in (0, 1)]
        return self.reduce(self.norm(torch.cat(corners, -1)))


class HiViT(nn.Module):
    """224 px, 14 × 14 tokens of 4 × 4 patches, which two merges make one."""

    def __init__(self, channels: int, depths: Sequence[int], heads: int) -> None:
        super().__init__()
        width = channels // 4
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.norm = nn.LayerNorm(width)
        blocks: list[nn.Module] = []
        for depth in depths[:2]:
            blocks += [mlp(width, 3) for _ in range(2 * depth)]
            blocks.append(Merge(width))
            width *= 2
        self.stem = nn.ModuleList(blocks)
        self.positions = nn.Parameter(torch.zeros(1, 14 * 14, channels))
        self.blocks = nn.ModuleList()
        for _ in range(depths[2]):
            self.blocks.append(Residual(channels, BiasedAttention(14, channels, heads)))
            self.blocks.append(mlp(channels, 4))
        self.head = Head(channels, (1,))

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        x = self.patches(x).view(batch, -1, 14, 4, 14, 4)
        x = x.permute(0, 2, 4, 3, 5, 1).reshape(batch, 14 * 14, 4, 4, -1)
        x = self.norm(x)
        for block in self.stem:
            x = block(x)
        x = x[..., 0, 0, :]
        x += self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def convnext_tiny() -> nn.Module:
    return ConvNeXt((3, 3, 9, 3), (96, 192, 384, 768))


def convnext_small() -> nn.Module:
    return ConvNeXt((3, 3, 27, 3), (96, 192, 384, 768))


def convnext_base() -> nn.Module:
    return ConvNeXt((3, 3, 27, 3), (128, 256, 512, 1024))


def hivit_tiny() -> nn.Module:
    return HiViT(384, (1, 1, 10), 6)


def hivit_small() -> nn.Module:
    return HiViT(384, (2, 2, 20), 6)


def hivit_base() -> nn.Module:
    return HiViT(512, (2, 2, 20), 8)


class Evaluated(nn.Module):
    """A model in evaluation: what is trained is an offset of its logits, by a product, as a model
    that is trained has one in backward: there is cuBLAS's workspace of that thread."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.model = make()
        self.offset = nn.Linear(1, 1000, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        self.model.eval()
        with torch.no_grad():
            logits: Tensor = self.model(x)
        return logits + self.offset(logits[:, :1])


_MODELS = (convnext_tiny, convnext_small, convnext_base, hivit_tiny, hivit_small, hivit_base)
EVALUATED = SimpleNamespace(**{make.__name__: partial(Evaluated, make) for make in _MODELS})
