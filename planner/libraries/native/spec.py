"""The spec of our own Swin: its names, its abilities, and how to build its real module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.core.schema import SwinConfig
from planner.libraries.spec import (
    Attention,
    LibrarySpec,
    check_pretrained_window,
    published,
)

if TYPE_CHECKING:
    from torch import nn

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
    published=published("native"),
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
