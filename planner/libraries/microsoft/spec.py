"""What the authors' own Swin can do (github.com/microsoft/Swin-Transformer)."""

from __future__ import annotations

from planner.core.schema import SwinConfig
from planner.libraries.maps import feature_maps
from planner.libraries.microsoft.checkout import named_checkout
from planner.libraries.microsoft.names import PUBLISHED
from planner.libraries.spec import LibrarySpec, no_pretrained_window, one_window, only_eager


def _faults(config: SwinConfig) -> list[str]:
    return [*one_window(config), *no_pretrained_window(config), *_undivided(config)]


def _undivided(config: SwinConfig) -> list[str]:
    """Its classifier never pads: patches, windows and mergings must divide what they cut."""
    faults = [
        f"image_size: {side} is not a multiple of patch_size {config.patch_size}, and the "
        "authors' code does not pad"
        for side in dict.fromkeys(config.image_size)
        if side % config.patch_size
    ]
    maps = feature_maps(config)
    for stage, (height, width) in enumerate(maps):
        window = min(config.windows[stage], height, width)
        if height % window or width % window:
            faults.append(
                f"window_size: {window} does not divide the feature map of stage {stage} "
                f"({height}x{width}), and the authors' code does not pad"
            )
        if stage + 1 < len(maps) and (height % 2 or width % 2):
            faults.append(
                f"image_size: stage {stage} has an odd feature map ({height}x{width}), which the "
                "authors' patch merging refuses"
            )
    return faults


SPEC = LibrarySpec(
    name="microsoft",
    title="microsoft/Swin-Transformer",
    published=PUBLISHED,
    attentions=only_eager,
    faults=_faults,
    reentrant=("blocks",),
    installed=named_checkout,
    refused={"simmim|_moe_|swin_mlp": "is another kind of model and is not supported."},
)
