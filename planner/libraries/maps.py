"""Feature maps of a Swin's stages."""

from __future__ import annotations

from planner.schema import SwinConfig

CPB_HIDDEN = 512  # channels in version 2's MLP of the position bias, in every library


def feature_maps(config: SwinConfig) -> list[tuple[int, int]]:
    """(height, width) of each stage's feature map in tokens, odd sides rounded up on halving."""
    height, width = (side // config.patch_size for side in config.image_size)
    maps = []
    for _ in config.depths:
        maps.append((height, width))
        height, width = (height + 1) // 2, (width + 1) // 2
    return maps
