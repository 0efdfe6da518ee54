"""Our adapters beside those of peft: the same layers, the same weights."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pytest

from planner.core.schema import ResolvedSetting, SwinConfig, TrainSetting
from planner.libraries.building import declare_missing_operators
from planner.libraries.maps import HEADS, Trainable
from planner.libraries.registry import find_library
from planner.libraries.spec import LibrarySpec
from tests.building import build_real
from tests.libraries.steps import Changes, name_of, needs, setting_of
from tests.trainers.cases import tiny

if TYPE_CHECKING:
    from torch import nn

pytestmark = needs("torch", "timm", "transformers", "peft")

CASES: tuple[tuple[SwinConfig, Changes], ...] = (
    (tiny("timm", depths=(1, 1)), {"frozen_stages": 1, "precision": "bf16"}),
    (tiny("transformers", 2, depths=(1, 1)), {"lora_targets": "all", "precision": "pure-bf16"}),
)


def title_of(value: object) -> str:
    return value.title if isinstance(value, SwinConfig) else name_of(value)


def resolved(config: SwinConfig, changes: Changes) -> tuple[LibrarySpec, ResolvedSetting]:
    spec = find_library(config.library)
    return spec, spec.resolve(config, setting_of({"lora_rank": 4, **changes}))


def wrapped_by_peft(config: SwinConfig, setting: ResolvedSetting) -> nn.Module:
    """The library's module in peft's own adapters; dropout 0, alpha = r, no biases."""
    declare_missing_operators()
    from peft import LoraConfig, get_peft_model

    spec = find_library(config.library)
    chosen = Trainable.of(setting, spec.frozen_names)
    plain = TrainSetting(attention=setting.attention, precision=setting.precision)
    module = build_real(config, plain)
    rank = setting.lora_rank
    asked = LoraConfig(r=rank, lora_alpha=rank, lora_dropout=0.0, target_modules=chosen.adapted)
    with warnings.catch_warnings():  # peft asks transformers by a name that is going
        warnings.simplefilter("ignore", FutureWarning)
        wrapped: nn.Module = get_peft_model(module, asked)
    for name, parameter in module.named_parameters():
        if name.startswith(HEADS):
            parameter.requires_grad_(True)
    for layer in wrapped.modules():
        if hasattr(layer, "cast_input_dtype_enabled"):
            layer.cast_input_dtype_enabled = False  # else its input goes to fp32 and back
    return wrapped.train()


@pytest.mark.parametrize(("config", "changes"), CASES, ids=title_of)
def test_what_is_trained_is_what_peft_trains(config: SwinConfig, changes: Changes) -> None:
    _, setting = resolved(config, changes)
    ours, theirs = build_real(config, setting), wrapped_by_peft(config, setting)
    shapes = [
        sorted(tuple(p.shape) for p in module.parameters() if p.requires_grad)
        for module in (ours, theirs)
    ]
    assert shapes[0] == shapes[1]
