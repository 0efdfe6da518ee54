"""Frozen stages and adapters in emitted files: what they train is what the probe trains."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from planner.core.schema import Model, SwinConfig, TrainSetting
from planner.estimation.estimate import resolve
from planner.libraries.missing_operators import declare_missing_operators
from planner.libraries.registry import find_library
from planner.trainers.emission import Emitted, emit_setting
from planner.training.step import Training
from planner.training.tasks import task_for
from tests.libraries.steps import needs
from tests.trainers.cases import FakeEstimator, executed, tiny

declare_missing_operators()
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

# peft asks transformers by a name that is going.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

LORA = {"lora_rank": 2, "lora_targets": "all", "frozen_stages": 1}
FROZEN = {"frozen_stages": 1}
CASES: list[tuple[str, SwinConfig, dict[str, Any]]] = [
    ("pytorch", tiny("timm"), LORA),
    ("pytorch", tiny("native", 2), FROZEN),
    ("transformers", tiny("transformers"), LORA),
    ("lightning", tiny("torchvision"), FROZEN),
    ("deepspeed", tiny("native"), {"lora_rank": 2, "checkpointing": "stages"}),
]


def emitted(target: str, model: Model, **fields: Any) -> Emitted:
    setting = TrainSetting(batch_size=2, **{"precision": "fp32", **fields})
    return emit_setting(model, setting, target, estimator=FakeEstimator())


def trained(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names, peft's in our words, and shapes of what is trained."""
    found = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            name = name.removeprefix("base_model.model.").replace("modules_to_save.default.", "")
            for matrix in "ab":
                name = name.replace(f"lora_{matrix.upper()}.default.weight", f"lora_{matrix}")
            found[name] = tuple(parameter.shape)
    return found


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )


def a_step(module: nn.Module, setting: TrainSetting, optimizer: torch.optim.Optimizer) -> None:
    output = module(torch.randn(2, 3, 32, 32))
    getattr(output, "logits", output).sum().backward()
    optimizer.step()


@needs("timm", "transformers", "peft")
@pytest.mark.parametrize(("target", "model", "fields"), CASES)
def test_what_is_trained_is_what_the_probe_trains(
    target: str, model: SwinConfig, fields: dict[str, Any]
) -> None:
    """Names and shapes of weights, and the bytes that the optimizer keeps of them."""
    setting = TrainSetting(batch_size=2, precision="fp32", **fields)
    names = executed(emitted(target, model, **fields))
    module: nn.Module = names["build_model"]()
    _, resolved = resolve(model, setting)
    task = task_for(model, resolved)
    probed = Training(task.module().train(), resolved, task, task.batch(2, torch.device("cpu")))
    assert trained(module) == trained(probed.module)
    probed.step()
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = (
        names["build_optimizer"](module, 1e-3)
        if "build_optimizer" in names
        else torch.optim.AdamW(parameters, foreach=True)  # which the Trainer makes by itself
    )
    a_step(module, setting, optimizer)
    assert state_bytes(optimizer) == state_bytes(probed.optimizer) > 0


PUBLISHED = [
    ("timm", "swin_tiny_patch4_window7_224", "pretrained=pretrained"),
    ("torchvision", "swin_t", 'get_model_weights("swin_t")'),
    ("transformers", "microsoft/swin-tiny-patch4-window7-224", "from_pretrained("),
]


@pytest.mark.parametrize(("library", "name", "call"), PUBLISHED)
def test_published_weights_are_asked_for_where_a_part_is_trained(
    library: str, name: str, call: str
) -> None:
    model = find_library(library).published[name].model_copy(update={"num_classes": 7})
    result = emitted("pytorch", model, frozen_stages=2)
    assert call in result.text
    assert "--pretrained" in result.launch
    assert "def build_model(pretrained: bool = False)" in result.text
    assert not any("no published weights" in warning for warning in result.warnings)
    assert "build_model(pretrained=True)" in emitted("accelerate", model, frozen_stages=2).code
    whole = emitted("pytorch", model)
    assert "--pretrained" not in whole.launch, "from scratch, unless it is asked"
    assert "def build_model(pretrained: bool = False)" in whole.text
    other = model.model_copy(update={"embed_dim": 48, "num_heads": (3, 6, 12, 24)})
    assert any("load yours" in w for w in emitted("pytorch", other, frozen_stages=2).warnings)


@needs("timm")
def test_timm_s_weights_are_loaded_beneath_the_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The download only is ours: timm fits the weights to another classifier."""
    import timm

    name = "swin_tiny_patch4_window7_224"
    published = timm.create_model(name, num_classes=1000).state_dict()
    builder = sys.modules["timm.models._builder"]
    monkeypatch.setattr(builder, "load_state_dict_from_hf", lambda *a, **k: dict(published))
    model = find_library("timm").published[name].model_copy(update={"num_classes": 7})
    built = executed(emitted("pytorch", model, **LORA))["build_model"](pretrained=True)
    loaded = {
        key.replace(".base.", "."): value
        for key, value in built.state_dict().items()
        if "lora_" not in key and not key.startswith("head.")
    }
    assert loaded.keys() == {key for key in published if not key.startswith("head.")}
    for key, value in loaded.items():
        assert torch.equal(value, published[key]), key
