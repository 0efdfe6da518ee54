"""Small modules to trace, and how the tests of a trace look at it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from planner.core.schema import FactoryModel, SwinConfig  # noqa: E402
from planner.libraries.missing_operators import declare_missing_operators  # noqa: E402

SMALL = SwinConfig(
    image_size=64, num_classes=10, embed_dim=32, depths=(1, 1), num_heads=(1, 2), window_size=4
)


TINY_IMAGES = FactoryModel(factory="tests:none", image_size=(4, 4), num_classes=10)


def swin_timm(version: int) -> nn.Module:
    declare_missing_operators()
    timm = pytest.importorskip("timm")
    kind = (
        timm.models.swin_transformer.SwinTransformer
        if version == 1
        else timm.models.swin_transformer_v2.SwinTransformerV2
    )
    return kind(
        img_size=64,
        window_size=4,
        embed_dim=32,
        depths=(1, 1),
        num_heads=(1, 2),
        num_classes=10,
        drop_path_rate=0.1,
    )


class Classifier(nn.Module):
    """One Linear over all pixels: 3·4·4 = 48 numbers an image."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(48, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images.flatten(1))
