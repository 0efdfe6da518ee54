"""Our adapters beside those of peft: the same layers, the same weights."""

from __future__ import annotations

import pytest

from planner.core.schema import SwinConfig, TrainSetting
from planner.libraries.building import declare_missing_operators
from planner.libraries.maps import HEADS, Trainable
from planner.libraries.registry import find_library
from tests.building import build_real
from tests.libraries.steps import Changes, name_of, needs
from tests.trainers.cases import tiny

pytestmark = needs("torch", "timm", "transformers", "peft")


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (tiny("timm", depths=(1, 1)), {"frozen_stages": 1}),
        (tiny("transformers", 2, depths=(1, 1)), {"lora_targets": "all"}),
    ],
    ids=name_of,
)
def test_what_is_trained_is_what_peft_trains(config: SwinConfig, changes: Changes) -> None:
    declare_missing_operators()
    from peft import LoraConfig, get_peft_model

    spec = find_library(config.library)
    setting = spec.resolve(config, TrainSetting(lora_rank=4, **changes))
    chosen = Trainable.of(setting, spec.frozen_names)
    plain = build_real(config, TrainSetting(attention=setting.attention))
    theirs = get_peft_model(plain, LoraConfig(r=4, target_modules=chosen.adapted))
    for name, parameter in plain.named_parameters():
        if name.startswith(HEADS):
            parameter.requires_grad_(True)
    ours, theirs = (
        sorted(tuple(p.shape) for p in module.parameters() if p.requires_grad)
        for module in (build_real(config, setting), theirs)
    )
    assert ours == theirs
