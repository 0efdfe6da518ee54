"""torchvision's Swins, with the stochastic depth that each of its builders sets."""

from __future__ import annotations

from planner.core.schema import SwinConfig
from planner.libraries.published import by_name, published

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
