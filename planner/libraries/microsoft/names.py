"""The configurations of github.com/microsoft/Swin-Transformer, by the names of their YAML files.

Each with the drop path its file sets; the class count follows from its data set. SimMIM, MoE and
MLP configurations are other models.
"""

from __future__ import annotations

from planner.core.schema import SwinConfig
from planner.libraries.published import IMAGENET_22K, PRETRAINED_192, by_name, published


def _v1(size: str, window: int, image: int, suffix: str, rate: float) -> SwinConfig:
    name = f"swin_{size}_patch4_window{window}_{image}{suffix}"
    own = {"num_classes": IMAGENET_22K} if suffix == "_22k" else {}
    return published("microsoft", name, size, 1, image, window, drop_path_rate=rate, **own)


def _v2(size: str, window: int, rate: float) -> SwinConfig:
    name = f"swinv2_{size}_patch4_window{window}_256"
    return published("microsoft", name, size, 2, 256, window, drop_path_rate=rate)


def _v2_pretrained(size: str) -> SwinConfig:
    return published(
        "microsoft", f"swinv2_{size}_patch4_window12_192_22k", size, 2, 192, 12,
        num_classes=IMAGENET_22K, drop_path_rate=0.2,
    )  # fmt: skip


def _v2_enlarged(size: str, window: int, image: int) -> SwinConfig:
    return published(
        "microsoft", f"swinv2_{size}_patch4_window12to{window}_192to{image}_22kto1k_ft",
        size, 2, image, window, pretrained_window_size=PRETRAINED_192, drop_path_rate=0.2,
    )  # fmt: skip


PUBLISHED: dict[str, SwinConfig] = by_name(
    [
        _v1("tiny", 7, 224, "", 0.2),
        _v1("tiny", 7, 224, "_22k", 0.1),
        _v1("tiny", 7, 224, "_22kto1k_finetune", 0.1),
        _v1("small", 7, 224, "", 0.3),
        _v1("small", 7, 224, "_22k", 0.2),
        _v1("small", 7, 224, "_22kto1k_finetune", 0.2),
        _v1("base", 7, 224, "", 0.5),
        _v1("base", 7, 224, "_22k", 0.2),
        _v1("base", 7, 224, "_22kto1k_finetune", 0.2),
        _v1("base", 12, 384, "_finetune", 0.5),
        _v1("base", 12, 384, "_22kto1k_finetune", 0.2),
        _v1("large", 7, 224, "_22k", 0.2),
        _v1("large", 7, 224, "_22kto1k_finetune", 0.2),
        _v1("large", 12, 384, "_22kto1k_finetune", 0.2),
        published(
            "microsoft", "swin_tiny_c24_patch4_window8_256", "tiny", 1, 256, 8,
            num_heads=(4, 8, 16, 32), drop_path_rate=0.2,
        ),
        *(_v2("tiny", window, 0.2) for window in (8, 16)),
        *(_v2("small", window, 0.3) for window in (8, 16)),
        *(_v2("base", window, 0.5) for window in (8, 16)),
        *(_v2_pretrained(size) for size in ("base", "large")),
        *(_v2_enlarged(size, 16, 256) for size in ("base", "large")),
        *(_v2_enlarged(size, 24, 384) for size in ("base", "large")),
    ]
)  # fmt: skip
