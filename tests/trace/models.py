"""Small modules to trace, and how the tests of a trace look at it."""

from __future__ import annotations

from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from planner.core.schema import FactoryModel, SwinConfig  # noqa: E402
from planner.ledger.ledger import Allocated, Marked  # noqa: E402
from planner.libraries.missing_operators import declare_missing_operators  # noqa: E402
from planner.trace.run import Trace  # noqa: E402

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


class Branches(nn.Module):
    """A large tensor with three users: at the first sum of its gradients, that of the third user
    is still to come, and the step is at its peak."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(48, 10)

    def forward(self, images: Tensor) -> Tensor:
        wide = (images * self.scale).repeat(1, 8, 1, 1)
        both = torch.add(torch.add(wide * 2, wide, alpha=3), wide, alpha=4)
        return self.head(both[:, :3].flatten(1))


def labels(trace: Trace, step: int = 1) -> Counter[str]:
    """How often each operation allocated in `step`, the last phase's name left out."""
    found: Counter[str] = Counter()
    inside = step == 0
    for event in trace.events:
        if isinstance(event, Allocated) and inside:
            found[event.label] += 1
        elif isinstance(event, Marked) and event.phase == "zero_grad":
            inside = event.step == step - 1
    return found


def attention_events(trace: Trace, part: str) -> list[int]:
    return [e.num_bytes for e in trace.events if isinstance(e, Allocated) and part in e.label]
