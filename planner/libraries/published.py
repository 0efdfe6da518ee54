"""The published sizes, which every library shares; each library's `names.py` adds its own defaults.

Sources: arXiv 2103.14030 §3.3 and 2111.09883 §3.5 (channels, depths), the authors' configuration
files (heads: 32 channels each).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from planner.core.schema import Library, SwinConfig

SIZES: Mapping[str, Mapping[str, Any]] = {
    "tiny": {"embed_dim": 96, "depths": (2, 2, 6, 2), "num_heads": (3, 6, 12, 24)},
    "small": {"embed_dim": 96, "depths": (2, 2, 18, 2), "num_heads": (3, 6, 12, 24)},
    "base": {"embed_dim": 128, "depths": (2, 2, 18, 2), "num_heads": (4, 8, 16, 32)},
    "large": {"embed_dim": 192, "depths": (2, 2, 18, 2), "num_heads": (6, 12, 24, 48)},
}
IMAGENET_1K, IMAGENET_22K = 1000, 21841  # classes

# Fine-tuned in version 2 with larger windows than in pre-training, at 192 pixels.
PRETRAINED_192 = (12, 12, 12, 6)


def published(
    library: Library, name: str, size: str, version: int, image: int, window: int, **own: Any
) -> SwinConfig:
    """The model that `library` publishes as `name`; `own` is what it sets otherwise."""
    fields = {
        "library": library,
        "name": name,
        "version": version,
        "image_size": image,
        "window_size": window,
        **SIZES[size],
        **own,
    }
    return SwinConfig.model_validate(fields)


def by_name(configs: Iterable[SwinConfig]) -> dict[str, SwinConfig]:
    return {config.name: config for config in configs if config.name is not None}
