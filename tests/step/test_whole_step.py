"""All of a training step but the model, on shapes and recorded: event by event the same.

Shown with torch 2.13.0 and timm 1.0.31 over a small native and a small timm model.
"""

import itertools

import pytest

from planner.core.errors import UnsupportedError
from planner.core.schema import SwinConfig, TrainSetting
from planner.core.schema.setting import FUSED_FAMILIES, OPTIMIZER_FAMILIES
from planner.estimation.estimate import estimate
from planner.ledger.ledger import Computed
from planner.libraries.shared import named_parameters
from planner.step.engine import AutocastScope
from planner.step.nn import Linear
from planner.step.tensor import Device, empty
from planner.step.training import FAMILIES
from planner.training.assembly import make_optimizers, step_setting
from tests.steps import (
    Changes,
    assert_equal_to_torch,
    build_real,
    name_of,
    needs,
    on_shapes,
    require,
    setting_of,
)

pytestmark = needs("torch", "timm")

# One stage of two blocks, the second shifted, then one: little to run, and every kind of parameter.
SMALL = SwinConfig(
    library="native", image_size=56, depths=(2, 1), num_heads=(3, 6), embed_dim=48, num_classes=10
)
# Names of the weights in every library's own words, and adapters where attention calls its layers.
KINDS = tuple(itertools.product(("native", "timm"), (1, 2)))
WITH_ADAPTERS = [("native", 1), ("timm", 1)]


def small(library: str = "native", **changes: object) -> SwinConfig:
    return SwinConfig.model_validate({**SMALL.model_dump(), "library": library, **changes})


# What an optimizer does, it does to parameters: one block has every kind of them.
ONE_BLOCK = small(depths=(1,), num_heads=(3,))


# Each family in each implementation; precisions and what else a step does with gradients by turns.
IMPLEMENTATIONS = [
    f"{family}-{how}"
    for family in FAMILIES
    for how in ("foreach", "fused")
    if how != "fused" or family in FUSED_FAMILIES
]
TURNS: tuple[Changes, ...] = (
    {"precision": "fp16", "clip_grad": True},
    {"precision": "bf16"},
    {"precision": "fp16"},
    {"precision": "pure-bf16", "clip_grad": True},
    {"precision": "fp32"},
)


@pytest.mark.parametrize(
    ("optimizer", "changes"),
    [
        *zip(IMPLEMENTATIONS, itertools.cycle(TURNS)),
        ("adamw-foreach", {"precision": "bf16"}),
    ],
    ids=name_of,
)
def test_optimizers(optimizer: str, changes: Changes) -> None:
    assert_equal_to_torch(ONE_BLOCK, setting_of({"optimizer": optimizer, **changes}))


def test_every_family_is_made_for_real() -> None:
    import torch

    assert set(FAMILIES) < set(OPTIMIZER_FAMILIES)
    for family in OPTIMIZER_FAMILIES:
        setting = TrainSetting(batch_size=1, optimizer=family)
        weights = [torch.nn.Parameter(torch.zeros(2, 2))]
        (made,) = make_optimizers(weights, None, setting, step_setting(small(), setting))
        assert type(made).__name__.lower() == family
        if family not in FUSED_FAMILIES:
            with pytest.raises(UnsupportedError, match=f"{family} has no fused") as refused:
                TrainSetting(optimizer=f"{family}-fused").check_optimizer()
            assert f"{family}-foreach" in refused.value.way_out


@pytest.mark.parametrize(
    ("loss", "precision"),
    [("label-smoothing", "fp32"), ("soft-target", "bf16"), ("soft-target", "pure-bf16")],
)
def test_losses(loss: str, precision: str) -> None:
    setting = setting_of({"loss": loss, "precision": precision, "batch_size": 3})
    # 1000 classes, or the loss's tensors would all round to the same 512 B.
    assert_equal_to_torch(small(num_classes=1000, depths=(1,), num_heads=(3,)), setting)


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "fp32", "clip_grad": True},
        {"precision": "pure-bf16", "accumulate": 2, "zero_grad_to_none": False},
    ],
    ids=name_of,
)
def test_average_clipping_and_zeroing(changes: Changes) -> None:
    assert_equal_to_torch(ONE_BLOCK, setting_of({"ema": True, **changes}))


DROPPING: Changes = {"drop_rate": 0.1, "attn_drop_rate": 0.1, "drop_path_rate": 0.2}
# Where all stages are frozen, and where adapters are, is each library's own matter.
TRAINED_IN_PART = [
    ("native", 2, {"frozen_stages": 1, "precision": "fp16", "checkpointing": "blocks"}),
    ("timm", 2, {"frozen_stages": 2}),
    ("timm", 1, {"frozen_stages": 1, "precision": "pure-bf16", "checkpointing": "stages"}),
    ("native", 2, {"frozen_stages": 2, "ema": True}),
    ("native", 1, {"lora_rank": 4, "frozen_stages": 1, "optimizer": "adafactor"}),
    ("timm", 1, {"lora_rank": 4, "lora_targets": "all"}),
]


@pytest.mark.parametrize(("library", "version", "changes"), TRAINED_IN_PART, ids=name_of)
def test_frozen_stages_and_adapters(library: str, version: int, changes: Changes) -> None:
    require(library)
    assert_equal_to_torch(small(library, version=version, depths=(1, 1)), setting_of(changes))


@pytest.mark.parametrize(("library", "version"), KINDS)
def test_the_same_weights_are_trained(library: str, version: int) -> None:
    """By name: a frozen weight too many or too few, or an adapter elsewhere, would show here."""
    require(library)
    config = small(library, version=version)
    settings = [TrainSetting(frozen_stages=stages) for stages in (0, 1, 2)]
    if (library, version) in WITH_ADAPTERS:
        settings.append(TrainSetting(frozen_stages=1, lora_rank=2))
        settings.append(TrainSetting(frozen_stages=1, lora_rank=2, lora_targets="all"))
    for setting in settings:
        real = build_real(config, setting).named_parameters()
        ours = named_parameters(on_shapes(config, setting)(Device()))
        assert [(name, tuple(p.shape), p.requires_grad) for name, p in real] == [
            (name, p.shape, p.requires_grad) for name, p in ours
        ]


def trained(config: SwinConfig, setting: TrainSetting) -> list[str]:
    module = on_shapes(config, setting)(Device())
    return [name for name, p in named_parameters(module) if p.requires_grad]


@pytest.mark.parametrize(("library", "version"), [*KINDS, ("microsoft", 1), ("microsoft", 2)])
def test_frozen_stages_leave_the_rest(library: str, version: int) -> None:
    """With both stages frozen the last norm and the classifier are left; with one, the second."""
    config = small(library, version=version)
    both = trained(config, TrainSetting(frozen_stages=2))
    assert len(both) == 4
    assert all("norm." in name or "head." in name or "classifier." in name for name in both)
    second = set(trained(config, TrainSetting(frozen_stages=1))) - set(both)
    assert second == {n for n in trained(config, TrainSetting()) if n.startswith("layers.1.")}
    assert second


def test_a_frozen_weight_is_cast_each_time() -> None:
    """Autocast keeps only casts of leaves that need a gradient (aten/src/ATen/autocast_mode.cpp):
    two calls of a frozen layer are four casts of its weights, of a trained one two."""
    for requires_grad, num_casts in ((True, 2), (False, 4)):
        device = Device()
        layer = Linear(device, 4, 4)
        for parameter in layer.parameters():
            parameter.requires_grad = requires_grad
        x = empty(device, (2, 4), "bfloat16", "x")
        with AutocastScope(device, "bfloat16"):
            layer(x)
            layer(x)
        casts = [e for e in device.events if isinstance(e, Computed) and e.kind == "copy"]
        assert len(casts) == num_casts


REFUSED: tuple[tuple[SwinConfig, Changes, str, str], ...] = (
    (small(), {"frozen_stages": 3}, "2 stages", "Freeze at most 2"),
    (small("timm", version=2), {"lora_rank": 4}, "version 2", "Use version 1"),
    (small("microsoft"), {"lora_rank": 4, "checkpointing": "blocks"}, "reentrant", "stages"),
    (small("microsoft"), {"frozen_stages": 1, "checkpointing": "blocks"}, "reentrant", "stages"),
)


@pytest.mark.parametrize(("config", "changes", "law", "way_out"), REFUSED, ids=name_of)
def test_refused(config: SwinConfig, changes: Changes, law: str, way_out: str) -> None:
    with pytest.raises(UnsupportedError, match=law) as refused:
        estimate(config, setting_of(changes))
    assert way_out in refused.value.way_out
