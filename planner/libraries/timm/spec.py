"""What timm's Swin can do."""

from __future__ import annotations

from planner.core.schema import SwinConfig
from planner.libraries.spec import (
    IMAGENET_22K,
    PRETRAINED_192,
    Attention,
    LibrarySpec,
    by_name,
    no_pretrained_window,
    published,
    required,
)

# timm's Swins: the names of `timm.list_models`, and those with the tag of their weights.
#
# timm builds a name with the class count of its first weights and with drop path 0.1 at every
# size. `swinv2_cr_*` is another architecture (its own attention and norms) and is recorded.


def _v1(size: str, window: int, image: int) -> SwinConfig:
    name = f"swin_{size}_patch4_window{window}_{image}"
    return published("timm", name, size, 1, image, window)


def _s3(size: str, blocks: int, windows: tuple[int, ...]) -> SwinConfig:
    """Searched architectures (arXiv 2111.14725): Swin-T's channels, a window for each stage."""
    return published(
        "timm", f"swin_s3_{size}_224", "tiny", 1, 224, 7,
        depths=(2, 2, blocks, 2), window_size=windows,
    )  # fmt: skip


def _v2(size: str, window: int, image: int) -> SwinConfig:
    return published("timm", f"swinv2_{size}_window{window}_{image}", size, 2, image, window)


def _v2_pretrained(size: str) -> SwinConfig:
    return published(
        "timm", f"swinv2_{size}_window12_192", size, 2, 192, 12, num_classes=IMAGENET_22K
    )


def _v2_enlarged(size: str, window: int, image: int) -> SwinConfig:
    name = f"swinv2_{size}_window12to{window}_192to{image}"
    return published("timm", name, size, 2, image, window, pretrained_window_size=PRETRAINED_192)


PUBLISHED: dict[str, SwinConfig] = by_name(
    [
        *(_v1(size, 7, 224) for size in ("tiny", "small", "base", "large")),
        *(_v1(size, 12, 384) for size in ("base", "large")),
        _s3("tiny", 6, (7, 7, 14, 7)),
        _s3("small", 18, (14, 14, 14, 7)),
        _s3("base", 30, (7, 7, 14, 7)),
        *(_v2(size, window, 256) for size in ("tiny", "small", "base") for window in (8, 16)),
        *(_v2_pretrained(size) for size in ("base", "large")),
        *(_v2_enlarged(size, 16, 256) for size in ("base", "large")),
        *(_v2_enlarged(size, 24, 384) for size in ("base", "large")),
    ]
)

_TAGS = {
    "ms_in1k": (
        "swin_tiny_patch4_window7_224", "swin_small_patch4_window7_224",
        "swin_base_patch4_window7_224", "swin_base_patch4_window12_384",
        "swin_s3_tiny_224", "swin_s3_small_224", "swin_s3_base_224",
        "swinv2_tiny_window8_256", "swinv2_tiny_window16_256", "swinv2_small_window8_256",
        "swinv2_small_window16_256", "swinv2_base_window8_256", "swinv2_base_window16_256",
    ),
    "ms_in22k": (
        "swin_tiny_patch4_window7_224", "swin_small_patch4_window7_224",
        "swin_base_patch4_window7_224", "swin_base_patch4_window12_384",
        "swin_large_patch4_window7_224", "swin_large_patch4_window12_384",
        "swinv2_base_window12_192", "swinv2_large_window12_192",
    ),
    "ms_in22k_ft_in1k": (
        "swin_tiny_patch4_window7_224", "swin_small_patch4_window7_224",
        "swin_base_patch4_window7_224", "swin_base_patch4_window12_384",
        "swin_large_patch4_window7_224", "swin_large_patch4_window12_384",
        "swinv2_base_window12to16_192to256", "swinv2_base_window12to24_192to384",
        "swinv2_large_window12to16_192to256", "swinv2_large_window12to24_192to384",
    ),
}  # fmt: skip


def _tagged(name: str, tag: str) -> SwinConfig:
    classes = IMAGENET_22K if tag == "ms_in22k" else PUBLISHED[name].num_classes
    return PUBLISHED[name].model_copy(update={"name": f"{name}.{tag}", "num_classes": classes})


TAGGED: dict[str, SwinConfig] = by_name(
    _tagged(name, tag) for tag, names in _TAGS.items() for name in names
)


def _attentions(config: SwinConfig) -> tuple[Attention, ...]:
    """Version 1 has a fused attention that timm leaves off; version 2 has none."""
    return ("eager", "sdpa") if config.version == 1 else ("eager",)


def _faults(config: SwinConfig) -> list[str]:
    return [
        *required(config, patch_norm=True, absolute_position_embedding=False),
        *no_pretrained_window(config),
    ]


SPEC = LibrarySpec(
    name="timm",
    title="timm",
    published=PUBLISHED,
    tagged=TAGGED,
    attentions=_attentions,
    faults=_faults,
    block_classes=("SwinTransformerBlock", "SwinTransformerV2Block"),
)
