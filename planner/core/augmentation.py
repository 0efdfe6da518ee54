"""What a Swin's authors do to pictures: a loader is measured with it, and a trainer trains with it.

Read in microsoft/Swin-Transformer @f82860b, config.py, where each figure's key stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Augmentation:
    """What is done to a training picture beside crop and flip, and how each picture is resized."""

    auto_augment: str = "rand-m9-mstd0.5-inc1"  # AUG.AUTO_AUGMENT, in timm's words
    color_jitter: float = 0.4  # AUG.COLOR_JITTER, which timm omits beside an auto_augment
    erasing: float = 0.25  # AUG.REPROB, of AUG.REMODE pixel and AUG.RECOUNT 1
    interpolation: str = "bicubic"  # DATA.INTERPOLATION
    crop_share: float = 0.875  # TEST.CROP: resized to 256/224, cropped at the centre (build.py)
