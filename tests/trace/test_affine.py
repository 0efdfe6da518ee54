"""A traced step is exactly affine in the batch: recorded at 2 and 7, it is as recorded at 3."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from planner.core.schema import Model, TrainSetting  # noqa: E402
from planner.ledger.affine import AffineLedger  # noqa: E402
from planner.libraries.resolve import resolve_model  # noqa: E402
from planner.trace.kept_step import RECORDED_BATCHES  # noqa: E402
from planner.trace.ledger import trace_estimate  # noqa: E402
from planner.trace.run import Build  # noqa: E402
from tests.libraries.steps import needs  # noqa: E402
from tests.test_checkpointing import IMAGES, MODELS  # noqa: E402


def assert_affine(model: Model, build: Build | None = None, **fields: object) -> AffineLedger:
    """Event by event: kind, label, path, bytes and FLOPs."""
    first, between, last = (
        trace_estimate(model, TrainSetting(batch_size=batch, precision="bf16", **fields), build)
        for batch in RECORDED_BATCHES
    )
    affine = AffineLedger.through(first, last)
    affine.check(between)
    return affine


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [
        pytest.param(*case, marks=() if case == ("ViT", "blocks") else pytest.mark.release)
        for case in itertools.product(MODELS, ["none", "blocks"])
    ],
)
def test_small_models(name: str, checkpointing: str) -> None:
    """Convolutions, batch norm, attention, depthwise convolutions; and with blocks run again."""
    affine = assert_affine(IMAGES, MODELS[name][0], checkpointing=checkpointing)
    assert affine.slopes


LIBRARIES = [
    ("timm:vit_small_patch16_224", "none"),
    ("timm:vit_small_patch16_224", "blocks"),
    ("timm:convnext_tiny", "none"),
    ("timm:convnext_tiny", "blocks"),
    ("timm:resnet50", "none"),
    ("timm:efficientnet_b0", "blocks"),
    ("torchvision:resnet50", "blocks"),
    ("torchvision:swin3d_t", "none"),
    ("torchvision:swin3d_t", "blocks"),
]


@pytest.mark.release
@needs("timm", "torchvision")
@pytest.mark.parametrize(("name", "checkpointing"), LIBRARIES)
def test_library_models(name: str, checkpointing: str) -> None:
    assert_affine(resolve_model(name, {}), checkpointing=checkpointing)


SWIN = {"model_type": "swin", "embed_dim": 48, "depths": [2, 2], "num_heads": [2, 4],
        "image_size": 64, "window_size": 4}  # fmt: skip
CONFIGURATIONS = {
    "masked": {**SWIN, "architectures": ["SwinForMaskedImageModeling"], "encoder_stride": 8},
    "UperNet": {
        "model_type": "upernet", "architectures": ["UperNetForSemanticSegmentation"],
        "backbone_config": {**SWIN, "image_size": 128, "out_features": ["stage1", "stage2"]},
        "hidden_size": 32, "pool_scales": [1, 2], "use_auxiliary_head": False, "num_labels": 7,
    },
}  # fmt: skip


@pytest.mark.release
@needs("transformers")
@pytest.mark.parametrize("checkpointing", ["none", "blocks"])
@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_models_of_transformers(kind: str, checkpointing: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIGURATIONS[kind]))
    assert_affine(resolve_model(f"transformers:{file}", {}), checkpointing=checkpointing)
