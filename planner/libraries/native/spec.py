"""The spec of our own Swin: its names, its abilities, and how to build its real module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.core.schema import SwinConfig
from planner.libraries.spec import (
    PRETRAINED_192,
    Attention,
    LibrarySpec,
    check_pretrained_window,
    index_by_name,
    published,
)

if TYPE_CHECKING:
    from torch import nn

# The authors' sizes, with the drop path that the authors trained each size with: in their
# configuration files for training on ImageNet-1k from scratch. Large was only fine-tuned from
# ImageNet-22k, with 0.2.
DROP_PATH = {"tiny": 0.2, "small": 0.3, "base": 0.5, "large": 0.2}


def _native(name: str, size: str, version: int, image: int, window: int) -> SwinConfig:
    return published("native", name, size, version, image, window, drop_path_rate=DROP_PATH[size])


def _enlarged(name: str, size: str, image: int, window: int) -> SwinConfig:
    """Version 2, fine-tuned with larger windows than in its pre-training."""
    extras = {"drop_path_rate": 0.2, "pretrained_window_size": PRETRAINED_192}
    return published("native", name, size, 2, image, window, **extras)


PUBLISHED: dict[str, SwinConfig] = index_by_name(
    [
        *(_native(f"swin_{size}", size, 1, 224, 7) for size in DROP_PATH),
        *(_native(f"swin_{size}_384", size, 1, 384, 12) for size in DROP_PATH),
        *(_native(f"swinv2_{size}", size, 2, 256, 8) for size in DROP_PATH),
        *(
            _native(f"swinv2_{size}_window16", size, 2, 256, 16)
            for size in ("tiny", "small", "base")
        ),
        _enlarged("swinv2_large_window16", "large", 256, 16),
        *(_enlarged(f"swinv2_{size}_384", size, 384, 24) for size in ("base", "large")),
    ]
)


# The fields of native's dataclass, `native_swin.SwinConfig`, for a model. No torch.

_SHARED_FIELDS = (
    "version", "image_size", "patch_size", "in_channels", "num_classes", "embed_dim", "depths",
    "num_heads", "windows", "pretrained_windows", "mlp_ratio", "qkv_bias", "drop_rate",
    "attn_drop_rate", "drop_path_rate", "patch_norm", "absolute_position_embedding",
)  # fmt: skip


def class_arguments(model: SwinConfig) -> dict[str, Any]:
    return {name: getattr(model, name) for name in _SHARED_FIELDS}


def _attentions(config: SwinConfig) -> tuple[Attention, ...]:
    """Fused in both versions: version 2 puts its cosine into the queries and keys beforehand."""
    return ("sdpa", "eager")


SPEC = LibrarySpec(
    name="native",
    title="native Swin",
    published=PUBLISHED,
    attentions=_attentions,
    faults=check_pretrained_window,
    block_classes=("BlockV1", "BlockV2"),
)


# The real module. Needs torch.


def build(config: SwinConfig, attention: str) -> nn.Module:
    """The module of `config`; `attention` is resolved (eager or sdpa)."""
    from planner.libraries.native import native_swin

    resolved: native_swin.Attention = "eager" if attention == "eager" else "sdpa"
    return native_swin.build_swin(native_swin.SwinConfig(**class_arguments(config)), resolved)
