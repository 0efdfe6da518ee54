"""args.yaml against train.py's recorded arguments and the factories that timm installs."""

from typing import Any

import pytest
import yaml

from planner.core.errors import UnsupportedError
from planner.core.schema import NamedModel, SwinConfig, TrainSetting
from planner.libraries.torchvision import declare_missing_operators
from planner.trainers.emission import emit_setting
from tests.steps import build_real
from tests.trainers.cases import tiny
from tests.trainers.keys import TIMM_ARGUMENTS

declare_missing_operators()
import timm  # noqa: E402
import timm.optim  # noqa: E402
import torch  # noqa: E402

OPTIMIZERS = ("adamw-fused", "sgd-fused", "radam-forloop")


def values(model: SwinConfig, **fields: Any) -> dict[str, Any]:
    setting = TrainSetting(batch_size=2, **fields)
    loaded = yaml.safe_load(emit_setting(model, setting, "timm").text)
    assert isinstance(loaded, dict)
    return loaded


def create_as_train_py_does(found: dict[str, Any]) -> torch.nn.Module:
    """The call of train.py with the arguments that it takes from the file."""
    module: torch.nn.Module = timm.create_model(
        found["model"], in_chans=found.get("in_chans", 3), num_classes=found["num_classes"],
        drop_rate=found.get("drop", 0.0), drop_path_rate=found["drop_path"],
        **found.get("model_kwargs", {}),
    )  # fmt: skip
    return module


def test_every_key_is_an_argument_of_train_py() -> None:
    found = values(
        tiny("timm", in_channels=1, drop_rate=0.1), optimizer="adamw", accumulate=2,
        precision="fp16", compile="max-autotune-no-cudagraphs", checkpointing="blocks",
        clip_grad=True, ema=True,
        loss="soft-target", memory_format="channels_last",
    )  # fmt: skip
    assert set(found) <= TIMM_ARGUMENTS, set(found) - TIMM_ARGUMENTS
    assert found["grad_accum_steps"] == 2
    assert found["channels_last"] is True
    assert found["torchcompile_mode"] == "max-autotune-no-cudagraphs"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_optimizer_is_the_one_that_was_probed(optimizer: str) -> None:
    from planner.training.building import make_optimizers, step_setting

    found = values(tiny("timm"), optimizer=optimizer)
    weights = [torch.nn.Parameter(torch.zeros(4, 4))]
    made = timm.optim.create_optimizer_v2(
        weights, opt=found["opt"], lr=1e-4, weight_decay=found.get("weight_decay", 0.01),
        momentum=found.get("momentum", 0.9), **found.get("opt_kwargs", {}),
    )  # fmt: skip
    setting = TrainSetting(optimizer=optimizer)
    (probed,) = make_optimizers(weights, None, setting, step_setting(tiny("timm"), setting))
    assert type(made) is type(probed)
    assert found["weight_decay"] == (0.05 if optimizer.startswith("adamw") else 0.0)
    for key in ("momentum", "nesterov", "fused"):
        assert (made.defaults.get(key) or 0) == (probed.defaults.get(key) or 0), key
    # None is torch's own choice on CUDA, foreach.
    assert (made.defaults.get("foreach") is False) == (probed.defaults.get("foreach") is False)


@pytest.mark.parametrize("version", [1, 2])
def test_the_model_is_the_one_that_was_probed(version: int) -> None:

    model = tiny("timm", version, in_channels=1, window_size=(4, 2), drop_path_rate=0.3)
    made = create_as_train_py_does(values(model))
    probed = build_real(model, TrainSetting())
    shapes = {name: tuple(weight.shape) for name, weight in probed.named_parameters()}
    assert {name: tuple(weight.shape) for name, weight in made.named_parameters()} == shapes
    assert made.layers[1].blocks[1].drop_path1.drop_prob == pytest.approx(0.3)
    assert made.layers[1].blocks[0].window_size == (2, 2)
    made(torch.zeros(1, 1, 32, 32))


@pytest.mark.parametrize("target", ["timm", "microsoft"])
def test_a_classifier_of_another_library_is_refused_for_what_it_is(target: str) -> None:
    model = NamedModel(
        library="torchvision", name="resnet50", task="classification", image_size=(224, 224),
        in_channels=3, num_classes=10,
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="written here for Swins") as caught:
        emit_setting(model, TrainSetting(batch_size=2), target)
    assert caught.value.way_out.startswith("Use --for pytorch")
    assert "step of its own" not in str(caught.value)


def test_any_classifier_of_timm_goes_to_its_train_py() -> None:
    """The file says the model and how a step runs, and of the recipe only what was asked."""
    name = "resnet18.a1_in1k"
    model = NamedModel(
        library="timm", name=name, task="classification", image_size=(224, 224), in_channels=3,
        num_classes=10,
    )  # fmt: skip
    setting = TrainSetting(batch_size=8, accumulate=2, precision="bf16", checkpointing="blocks")
    emitted = emit_setting(model, setting, "timm")
    found = yaml.safe_load(emitted.text)
    assert found == {
        "model": name, "num_classes": 10, "input_size": [3, 224, 224], "batch_size": 8,
        "grad_accum_steps": 2, "validation_batch_size": 8, "grad_checkpointing": True, "amp": True,
        "amp_dtype": "bfloat16", "channels_last": False, "workers": 8, "pin_mem": True,
        "no_prefetcher": False, "use_multi_epochs_loader": True, "opt": "adamw",
    }  # fmt: skip
    assert "It has 8 workers" in emitted.text
    resolved = setting.with_recipe(of_swin=False)  # as an advice holds it
    assert yaml.safe_load(emit_setting(model, resolved, "timm").text) == found
    assert emitted.launch.endswith("--lr LR")
    asked = setting.model_copy(update={"loss": "soft-target", "clip_grad": True, "ema": True})
    more = yaml.safe_load(emit_setting(model, asked, "timm").text)
    assert {key: value for key, value in more.items() if key not in found} == {
        "smoothing": 0.1, "mixup": 0.8, "cutmix": 1.0, "mixup_switch_prob": 0.5, "clip_grad": 5.0,
        "clip_mode": "norm", "model_ema": True, "model_ema_decay": 0.9999,
    }  # fmt: skip
