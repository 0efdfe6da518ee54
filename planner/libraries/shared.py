"""Parts on shapes that the Swins of several libraries share: MLP, patches, merging, windows; then
frozen weights and adapters, and checkpointing of chosen modules."""

from collections.abc import Iterable, Iterator
from typing import Any

from planner.core.schema import SwinConfig
from planner.libraries.maps import CPB_HIDDEN, Pair, Trainable
from planner.step import nn
from planner.step.engine import checkpoint
from planner.step.matmul import linear
from planner.step.pointwise import add, contiguous, scale
from planner.step.tensor import Device, Parameter, Tensor
from planner.step.views import (
    alias,
    cat,
    flatten,
    pad,
    permute,
    reshape,
    slice_,
    take_rows,
    unsqueeze,
    view,
)


class Mlp(nn.Module):
    """fc1, GELU, dropout, fc2, dropout (timm's Mlp, and the authors')."""

    def __init__(self, device: Device, dim: int, hidden: int, drop_rate: float) -> None:
        self.fc1 = nn.Linear(device, dim, hidden)
        self.act = nn.GELU()
        self.drop1 = nn.Dropout(drop_rate)
        self.fc2 = nn.Linear(device, hidden, dim)
        self.drop2 = nn.Dropout(drop_rate)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        x = self.act(x)
        x = self.drop1(x)
        x = self.fc2(x)
        x = self.drop2(x)
        return x


def drop_path_or_identity(rate: float) -> nn.Module:
    """`DropPath`, or `Identity` if the rate is 0."""
    return nn.DropPath(rate) if rate > 0 else nn.Identity()


class PatchEmbed(nn.Module):
    """Images [B, in_channels, height, width] to patches [B, H, W, C]."""

    def __init__(self, device: Device, config: SwinConfig) -> None:
        self.proj = nn.Conv2d(device, config.in_channels, config.embed_dim, config.patch_size)
        self.norm = nn.LayerNorm(device, config.embed_dim) if config.patch_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x)
        x = permute(x, 0, 2, 3, 1)
        x = self.norm(x)
        return x


def pad_to_even(x: Tensor) -> Tensor:
    """[B, H, W, C] padded to even sides; x itself if they are even."""
    _, height, width, _ = x.shape
    if height % 2 or width % 2:
        x = pad(x, height % 2, width % 2)
    return x


def split_parities(x: Tensor) -> list[Tensor]:
    """Four of [B, H/2, W/2, C]: `x[:, row::2, col::2, :]` of a BHWC tensor, columns slowest."""
    _, height, width, _ = x.shape
    return [
        slice_(slice_(x, 1, row, height, 2), 2, col, width, 2)
        for col in range(2)
        for row in range(2)
    ]


def join_as_tokens(parities: list[Tensor]) -> Tensor:
    """Four of [B, H/2, W/2, C] to [B, L/4, 4C]."""
    x = cat(parities, -1)
    return view(x, x.shape[0], -1, x.shape[-1])


def fold_parities(x: Tensor) -> Tensor:
    """[B, H, W, C] to [B, H/2, W/2, 4C] in one copy, in the order of `split_parities`."""
    batch, height, width, channels = x.shape
    x = reshape(x, batch, height // 2, 2, width // 2, 2, channels)
    return flatten(permute(x, 0, 1, 3, 4, 2, 5), 3)


class Merging(nn.Module):
    """Four patches to one, [.., 4C] to [.., 2C]. Version 2 norms after the reduction."""

    def __init__(self, device: Device, channels: int, version: int) -> None:
        self.version = version
        self.reduction = nn.Linear(device, 4 * channels, 2 * channels, bias=False)
        self.norm = nn.LayerNorm(device, 4 * channels if version == 1 else 2 * channels)

    def reduce(self, x: Tensor) -> Tensor:
        x = self.norm(x) if self.version == 1 else self.reduction(x)
        x = self.reduction(x) if self.version == 1 else self.norm(x)
        return x


# Feature maps cut into windows, as in several libraries' Swins.
#
# B batch, H W feature map, C channels, nW windows per image, N tokens per window, h heads.


def crop(x: Tensor, height: int, width: int) -> Tensor:
    """`x[:, :height, :width, :]` of a BHWC tensor; an alias of x if nothing is cut."""
    if (height, width) == x.shape[1:3]:
        return alias(x)
    if height != x.shape[1]:
        x = slice_(x, 1, 0, height)
    if width != x.shape[2]:
        x = slice_(x, 2, 0, width)
    return x


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


def spread_bias(table: Tensor, index: Tensor, area: int) -> Tensor:
    """The bias [h, N, N] of every pair of a window's tokens, from the rows [.., h] of a table."""
    bias = view(take_rows(table, view(index, -1)), area, area, -1)
    bias = contiguous(permute(bias, 2, 0, 1))
    return bias


def position_bias_mlp(device: Device, heads: int) -> nn.Sequential:
    """Version 2's MLP from the offset of a pair of tokens to its bias for each head."""
    return nn.Sequential(
        nn.Linear(device, 2, CPB_HIDDEN),
        nn.ReLU(in_place=True),
        nn.Linear(device, CPB_HIDDEN, heads, bias=False),
    )


def shift_mask(device: Device, resolution: Pair, window: Pair) -> Tensor:
    """The buffer of a shifted block: [nW, N, N]."""
    rows, columns = (-(-side // tokens) for side, tokens in zip(resolution, window, strict=True))
    area = window[0] * window[1]
    return nn.buffer(device, (rows * columns, area, area))


def add_shift_mask(scores: Tensor, mask: Tensor) -> Tensor:
    """The scores [B*nW, h, N, N] plus the mask [nW, N, N] of the windows of every image."""
    _, heads, area, _ = scores.shape
    by_image = view(scores, -1, mask.shape[0], heads, area, area)
    return view(add(by_image, unsqueeze(unsqueeze(mask, 1), 0)), -1, heads, area, area)


# Frozen weights and low-rank adapters on shapes, as `levers.py` applies them to a real module.


class LoraLinearOnShapes(nn.Module):
    """`LoraLinear` of `levers.py`: a linear layer plus a product of rank r."""

    def __init__(self, device: Device, base: nn.Linear, rank: int) -> None:
        out_features, in_features = base.weight.shape
        self.lora_a = Parameter(device, (rank, in_features))
        self.lora_b = Parameter(device, (out_features, rank))
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return add(y, scale(linear(linear(x, self.lora_a), self.lora_b)))


def apply_trainable(device: Device, module: nn.Module, trainable: Trainable) -> None:
    """Freezes the weights that are not trained, and inserts the adapters, in place."""
    for name, parameter in named_parameters(module):
        if trainable.is_frozen(name):
            parameter.requires_grad = False
    for parent, name, attribute in list(_attributes(module)):
        child = vars(parent)[attribute]
        if isinstance(child, nn.Linear) and trainable.is_adapted(name):
            setattr(parent, attribute, LoraLinearOnShapes(device, child, trainable.lora_rank))


def named_parameters(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
    """All parameters, by their names in the real module."""
    for name, value in vars(module).items():
        if isinstance(value, Parameter):
            yield prefix + name, value
    for name, child in module.children():
        yield from named_parameters(child, f"{prefix}{name}.")


def _attributes(module: nn.Module, prefix: str = "") -> Iterator[tuple[nn.Module, str, str]]:
    """(module, name in the model, attribute) of all attributes of all modules."""
    for attribute in vars(module):
        yield module, prefix + attribute, attribute
    for name, child in module.children():
        yield from _attributes(child, f"{prefix}{name}.")


# Cached: a class is a reference cycle, which only the collector would free.
_CHECKPOINTED_CLASSES: dict[tuple[type[nn.Module], bool], type[nn.Module]] = {}


def checkpoint_in_place(modules: Iterable[nn.Module], selective: bool = False) -> None:
    """Checkpoints each module: it saves only its inputs and recomputes its forward in backward.
    With `selective` it also keeps the results of matrix products and attention."""
    for module in modules:
        if selective:
            for part in module.descendants():
                if isinstance(part, nn.ReLU):
                    part.in_place = False
        key = (type(module), selective)
        if key not in _CHECKPOINTED_CLASSES:
            _CHECKPOINTED_CLASSES[key] = _make_checkpointed_class(*key)
        module.__class__ = _CHECKPOINTED_CLASSES[key]


def _make_checkpointed_class(kind: type[nn.Module], selective: bool) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any) -> Any:
        return checkpoint(kind.forward, self, *args, selective=selective)

    return type(f"Checkpointed{kind.__name__}", (kind,), {"forward": forward})
