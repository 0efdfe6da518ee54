"""All of a training step but the model, on shapes and traced: event by event the same.

Shown with torch 2.13.0 and timm 1.0.31 over a small native and a small timm model.
"""

from __future__ import annotations

import itertools

import pytest

from planner.errors import UnsupportedError
from planner.schema import SwinConfig, TrainSetting
from tests.libraries.steps import (
    Changes,
    assert_equal_to_cpu,
    assert_equal_to_trace,
    name_of,
    needs,
    setting_of,
)

pytestmark = needs("torch", "timm")

# One stage of two blocks, the second shifted, then one: little to run, and every kind of parameter.
SMALL = SwinConfig(
    library="native", image_size=56, depths=(2, 1), num_heads=(3, 6), embed_dim=48, num_classes=10
)
IMPLEMENTATIONS = ("foreach", "fused", "forloop")
FAMILIES_WITHOUT_FUSED = ("adafactor", "lion", "rmsprop", "nadam", "radam")
PRECISIONS = ("fp32", "bf16", "fp16", "pure-bf16")
LIBRARIES = ("native", "timm")


def small(library: str = "native", **changes: object) -> SwinConfig:
    return SwinConfig.model_validate({**SMALL.model_dump(), "library": library, **changes})


# Each family, implementation and precision at least once; all of them in the long test.
OPTIMIZERS: tuple[Changes, ...] = (
    {"optimizer": "adamw-foreach", "precision": "bf16", "amsgrad": True},
    {"optimizer": "adamw-fused", "precision": "fp16"},
    {"optimizer": "adamw-fused", "precision": "pure-bf16", "amsgrad": True},
    {"optimizer": "adam-forloop", "precision": "fp16", "amsgrad": True},
    {"optimizer": "sgd-fused", "precision": "fp16", "clip_grad": True},
    {"optimizer": "sgd-forloop", "precision": "pure-bf16"},
    {"optimizer": "adafactor", "precision": "fp32"},
    {"optimizer": "adafactor-foreach", "precision": "pure-bf16"},
    {"optimizer": "lion-foreach"},
    {"optimizer": "lion-forloop", "precision": "pure-bf16"},
    {"optimizer": "rmsprop-foreach", "precision": "fp16"},
    {"optimizer": "rmsprop-forloop"},
    {"optimizer": "nadam-foreach"},
    {"optimizer": "nadam-forloop", "precision": "pure-bf16"},
    {"optimizer": "radam-foreach", "precision": "fp16"},
    {"optimizer": "radam-forloop"},
)


@pytest.mark.parametrize("changes", OPTIMIZERS, ids=name_of)
def test_optimizers(changes: Changes) -> None:
    assert_equal_to_trace(small(), setting_of(changes))


@pytest.mark.long
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("clip_grad", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "amsgrad"),
    [
        *(
            (f"{family}-{how}", amsgrad)
            for family, how, amsgrad in itertools.product(
                ("adamw", "adam"), IMPLEMENTATIONS, (False, True)
            )
        ),
        *((f"sgd-{how}", False) for how in IMPLEMENTATIONS),
        *(
            (f"{family}-{how}", False)
            for family, how in itertools.product(FAMILIES_WITHOUT_FUSED, ("foreach", "forloop"))
        ),
    ],
)
def test_every_optimizer(
    library: str, precision: str, clip_grad: bool, optimizer: str, amsgrad: bool
) -> None:
    setting = setting_of(
        {
            "precision": precision,
            "optimizer": optimizer,
            "amsgrad": amsgrad,
            "clip_grad": clip_grad,
        }
    )
    assert_equal_to_trace(small(library), setting)


@pytest.mark.parametrize("family", FAMILIES_WITHOUT_FUSED)
def test_fused_is_refused_where_there_is_none(family: str) -> None:
    from planner import estimate

    setting = TrainSetting(optimizer=f"{family}-fused")
    with pytest.raises(UnsupportedError, match=f"{family} has no fused") as refused:
        estimate(small(), setting)
    assert f"{family}-foreach" in refused.value.way_out


LOSSES = ("label-smoothing", "soft-target")


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_losses(loss: str, precision: str) -> None:
    setting = setting_of({"loss": loss, "precision": precision, "batch_size": 3})
    # 1000 classes, or the loss's tensors would all round to the same 512 B.
    assert_equal_to_trace(small(num_classes=1000), setting)


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_real_tensors(loss: str) -> None:
    setting = setting_of({"loss": loss, "precision": "fp32"})
    assert_equal_to_cpu(small(num_classes=1000, drop_path_rate=0.0), setting)
