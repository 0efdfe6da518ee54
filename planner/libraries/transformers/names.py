"""The Swins on the Hugging Face hub, shipped here so that no hub is needed.

Each is what `AutoModelForImageClassification.from_pretrained(name)` builds: the published
configuration, with 1000 labels (21,841 for the ImageNet-22k weights) and drop path 0.1 at every
size. A configuration of your own has 2 labels by default there, and 1000 here: set num_classes.
"""

from __future__ import annotations

from planner.core.schema import SwinConfig
from planner.libraries.published import IMAGENET_22K, PRETRAINED_192, by_name, published

ORGANISATION = "microsoft/"


def _v1(size: str, window: int, image: int, suffix: str = "") -> SwinConfig:
    name = f"{ORGANISATION}swin-{size}-patch4-window{window}-{image}{suffix}"
    own = {"num_classes": IMAGENET_22K} if suffix else {}
    return published("transformers", name, size, 1, image, window, **own)


def _v2(size: str, window: int, image: int) -> SwinConfig:
    name = f"{ORGANISATION}swinv2-{size}-patch4-window{window}-{image}"
    return published("transformers", name, size, 2, image, window)


def _v2_pretrained(size: str) -> SwinConfig:
    name = f"{ORGANISATION}swinv2-{size}-patch4-window12-192-22k"
    return published("transformers", name, size, 2, 192, 12, num_classes=IMAGENET_22K)


def _v2_enlarged(size: str, window: int, image: int) -> SwinConfig:
    name = f"{ORGANISATION}swinv2-{size}-patch4-window12to{window}-192to{image}-22kto1k-ft"
    return published(
        "transformers", name, size, 2, image, window, pretrained_window_size=PRETRAINED_192
    )


PUBLISHED: dict[str, SwinConfig] = by_name(
    [
        *(_v1(size, 7, 224) for size in ("tiny", "small", "base", "large")),
        *(_v1(size, 12, 384) for size in ("base", "large")),
        *(_v1(size, 7, 224, "-in22k") for size in ("base", "large")),
        *(_v1(size, 12, 384, "-in22k") for size in ("base", "large")),
        *(_v2(size, window, 256) for size in ("tiny", "small", "base") for window in (8, 16)),
        *(_v2_pretrained(size) for size in ("base", "large")),
        *(_v2_enlarged(size, 16, 256) for size in ("base", "large")),
        *(_v2_enlarged(size, 24, 384) for size in ("base", "large")),
    ]
)
