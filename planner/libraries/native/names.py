"""The names of our own Swin: the authors' sizes, with the drop path they trained each size with."""

from __future__ import annotations

from planner.core.schema import SwinConfig
from planner.libraries.published import PRETRAINED_192, by_name, published

# The authors' configuration files, training on ImageNet-1k from scratch. Large was only fine-tuned
# from ImageNet-22k, with 0.2.
DROP_PATH = {"tiny": 0.2, "small": 0.3, "base": 0.5, "large": 0.2}


def _native(name: str, size: str, version: int, image: int, window: int) -> SwinConfig:
    return published("native", name, size, version, image, window, drop_path_rate=DROP_PATH[size])


def _enlarged(name: str, size: str, image: int, window: int) -> SwinConfig:
    """Version 2, fine-tuned in larger windows than it was pre-trained in."""
    own = {"drop_path_rate": 0.2, "pretrained_window_size": PRETRAINED_192}
    return published("native", name, size, 2, image, window, **own)


PUBLISHED: dict[str, SwinConfig] = by_name(
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
