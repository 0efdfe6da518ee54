"""What torchvision's Swin can do."""

from __future__ import annotations

from typing import Any

from planner.core.schema import SwinConfig
from planner.libraries.spec import LibrarySpec, by_name, one_window, only_eager, published, required

# torchvision's Swins, with the stochastic depth that each of its builders sets.

_SIZES = {"t": ("tiny", 0.2), "s": ("small", 0.3), "b": ("base", 0.5)}

PUBLISHED: dict[str, SwinConfig] = by_name(
    [
        *(
            published("torchvision", f"swin_{letter}", size, 1, 224, 7, drop_path_rate=rate)
            for letter, (size, rate) in _SIZES.items()
        ),
        *(
            published("torchvision", f"swin_v2_{letter}", size, 2, 256, 8, drop_path_rate=rate)
            for letter, (size, rate) in _SIZES.items()
        ),
    ]
)


# The arguments of torchvision's class for a model. No torch: an emitted script has them too.


def class_arguments(model: SwinConfig) -> dict[str, Any]:
    """Of `SwinTransformer`, without the classes of its blocks."""
    return {
        "patch_size": [model.patch_size] * 2,
        "embed_dim": model.embed_dim,
        "depths": list(model.depths),
        "num_heads": list(model.num_heads),
        "window_size": [model.windows[0]] * 2,
        "mlp_ratio": model.mlp_ratio,
        "dropout": model.drop_rate,
        "attention_dropout": model.attn_drop_rate,
        "stochastic_depth_prob": model.drop_path_rate,
        "num_classes": model.num_classes,
    }


def _faults(config: SwinConfig) -> list[str]:
    faults = [
        *required(
            config, in_channels=3, qkv_bias=True, patch_norm=True, absolute_position_embedding=False
        ),
        *one_window(config),
    ]
    if any(config.pretrained_windows):
        faults.append("pretrained_window_size: torchvision has no such option")
    if sum(config.depths) == 1:
        faults.append("depths: torchvision cannot build a model of one block")
    if config.version == 2 and config.windows[0] == 1:
        faults.append("window_size: torchvision's version 2 divides by window_size - 1")
    return faults


def _frozen_names(num_stages: int) -> tuple[str, ...]:
    """`features` is the embedding, then a stage and a merging in turn; a merging belongs to the
    stage that it leads to, as in timm."""
    return tuple(f"features.{index}" for index in range(2 * num_stages if num_stages else 0))


SPEC = LibrarySpec(
    name="torchvision",
    title="torchvision",
    published=PUBLISHED,
    attentions=only_eager,
    faults=_faults,
    frozen_names=_frozen_names,
    takes_adapters=lambda config: False,  # all of its attention is one function over weights
    is_on_shapes=False,
)
