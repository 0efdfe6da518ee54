"""args.yaml against train.py's recorded arguments and the factories that timm installs."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from planner.core.errors import UnsupportedError
from planner.core.schema import DeviceInfo, NamedModel, SwinConfig, TrainSetting
from planner.core.schema.loading import LoaderSetting
from planner.libraries.missing_operators import declare_missing_operators
from planner.libraries.timm.names import PUBLISHED
from planner.trainers.emission import emit, emit_setting
from planner.trainers.timm import create_model_arguments
from tests.building import build_real
from tests.trainers.cases import GIB, FakeEstimator, feeding, recommendation, tiny
from tests.trainers.keys import TIMM_ARGUMENTS
from tests.trainers.running.harness import decayed_wrongly

declare_missing_operators()
import timm  # noqa: E402
import timm.optim  # noqa: E402
import torch  # noqa: E402

OPTIMIZERS = ("adamw", "adamw-fused", "sgd-fused", "lion", "rmsprop", "radam-forloop")


def values(model: SwinConfig, **fields: Any) -> dict[str, Any]:
    setting = TrainSetting(batch_size=2, **fields)
    loaded = yaml.safe_load(emit_setting(model, setting, "timm", estimator=FakeEstimator()).text)
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
        loss="soft-target", validation_batch_size=8, memory_format="channels_last",
        amsgrad=True,
    )  # fmt: skip
    assert set(found) <= TIMM_ARGUMENTS, set(found) - TIMM_ARGUMENTS
    assert found["grad_accum_steps"] == 2
    assert found["channels_last"] is True
    assert found["torchcompile_mode"] == "max-autotune-no-cudagraphs"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_optimizer_is_the_one_that_was_probed(optimizer: str) -> None:
    from planner.training.step import make_optimizer

    found = values(tiny("timm"), optimizer=optimizer)
    weights = [torch.nn.Parameter(torch.zeros(4, 4))]
    made = timm.optim.create_optimizer_v2(
        weights, opt=found["opt"], lr=1e-4, weight_decay=found.get("weight_decay", 0.01),
        momentum=found.get("momentum", 0.9), **found.get("opt_kwargs", {}),
    )  # fmt: skip
    probed = make_optimizer(TrainSetting(optimizer=optimizer), weights)
    assert type(made) is type(probed)
    assert found["weight_decay"] == (0.05 if optimizer.startswith("adamw") else 0.0)
    for key in ("momentum", "nesterov", "amsgrad", "fused"):
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


def test_a_published_name_needs_no_override() -> None:
    for name, config in PUBLISHED.items():
        found, arguments = create_model_arguments(config)
        assert found == name
        assert set(arguments) == {"num_classes", "drop_path_rate"}
        # The same shape under another library's name finds the timm name again.
        assert create_model_arguments(config.model_copy(update={"library": "native"}))[0] == name


def test_the_image_size_reaches_the_model_too() -> None:
    """train.py gives `img_size` to the data alone."""
    square = SwinConfig(library="timm", name="swin_tiny_patch4_window7_224", image_size=280)
    assert values(square)["img_size"] == 280
    assert values(square)["model_kwargs"] == {"img_size": [280, 280]}
    wide = square.model_copy(update={"image_size": (224, 448)})
    assert values(wide)["input_size"] == [3, 224, 448]


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18.a1_in1k"])
def test_any_classifier_of_timm_goes_to_its_train_py(name: str) -> None:
    """The file says the model and how a step runs, and of the recipe only what was asked."""
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
        "amp_dtype": "bfloat16", "channels_last": False, "opt": "adamw",
    }  # fmt: skip
    assert emitted.launch.endswith("--lr LR")
    asked = setting.model_copy(update={"loss": "soft-target", "clip_grad": True, "ema": True})
    more = yaml.safe_load(emit_setting(model, asked, "timm").text)
    assert {key: value for key, value in more.items() if key not in found} == {
        "smoothing": 0.1, "mixup": 0.8, "cutmix": 1.0, "mixup_switch_prob": 0.5, "clip_grad": 5.0,
        "clip_mode": "norm", "model_ema": True, "model_ema_decay": 0.9999,
    }  # fmt: skip
    plain = yaml.safe_load(
        emit_setting(model, setting.model_copy(update={"loss": "cross-entropy"}), "timm").text
    )
    assert (plain["smoothing"], plain["mixup"], plain["cutmix"]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("version", [1, 2])
def test_timm_spares_what_the_recipe_spares(version: int) -> None:
    """create_optimizer_v2 asks the model's no_weight_decay, as train.py does."""
    model = build_real(tiny("timm", version), TrainSetting())
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", weight_decay=0.05)
    names = {p: name for name, p in model.named_parameters()}
    decays = {
        names[p]: (group["weight_decay"], p.dim())
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert len(decays) == len(names)
    assert not decayed_wrongly(decays)


def test_what_is_no_classifier_of_timm_is_refused() -> None:
    fields: dict[str, Any] = {"image_size": (224, 224), "in_channels": 3, "num_classes": 10}
    own_loss = NamedModel(library="transformers", name="ViT", task="own-loss", **fields)
    other = NamedModel(library="torchvision", name="resnet18", task="classification", **fields)
    for model in (own_loss, other):
        with pytest.raises(UnsupportedError, match=r"(?s)step of its own.*--for pytorch"):
            emit_setting(model, TrainSetting(), "timm")


def test_what_timm_needs_is_said_or_refused() -> None:
    """1.0.30 and before build neither of the first two, and decay more of version 2."""
    wide = tiny("timm", 2, image_size=(64, 32))
    for model in (tiny("timm", window_size=(4, 2)), wide, tiny("timm", 2)):
        assert "from 1.0.31 on" in emit_setting(model, TrainSetting(), "timm").text
    assert "1.0.31" not in emit_setting(tiny("timm"), TrainSetting(), "timm").text
    cpu = DeviceInfo(kind="cpu", name="a processor", total_bytes=16 * GIB)
    with pytest.raises(UnsupportedError, match="on GPUs only"):
        emit_setting(
            tiny("timm"), TrainSetting(world_size=2, precision="fp32"), "timm", device=cpu,
            estimator=FakeEstimator(),
        )  # fmt: skip
    alone = emit_setting(tiny("timm"), TrainSetting(precision="fp32"), "timm", device=cpu)
    assert "TF32" not in alone.text
    unmeasured = feeding(LoaderSetting(workers=0))
    loaded = emit(recommendation(feeding=unmeasured), "timm")
    assert "\nworkers: 1\n" in loaded.text
    assert "not in the training process" in loaded.text
