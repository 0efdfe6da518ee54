"""args.yaml against train.py's recorded arguments and the factories that timm installs."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from planner.libraries.missing_operators import declare_missing_operators
from planner.libraries.timm.names import PUBLISHED
from planner.schema import SwinConfig, TrainSetting
from planner.trainers.emission import emit_setting
from planner.trainers.timm import create_model_arguments
from tests.building import build_real
from tests.trainers.cases import FakeEstimator, tiny
from tests.trainers.keys import TIMM_ARGUMENTS

declare_missing_operators()
import timm  # noqa: E402
import timm.optim  # noqa: E402
import torch  # noqa: E402

OPTIMIZERS = (
    "adamw", "adamw-fused", "adamw-forloop", "adam", "sgd", "sgd-fused", "lion", "rmsprop", "nadam",
    "radam-forloop",
)  # fmt: skip


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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_key_is_an_argument_of_train_py(optimizer: str) -> None:
    found = values(
        tiny("timm", in_channels=1, drop_rate=0.1), optimizer=optimizer, accumulate=2,
        precision="fp16", compile="max-autotune-no-cudagraphs", checkpointing="blocks",
        clip_grad=True, ema=True,
        loss="soft-target", validation_batch_size=8, memory_format="channels_last",
        amsgrad=optimizer.startswith("adam"),
    )  # fmt: skip
    assert set(found) <= TIMM_ARGUMENTS, set(found) - TIMM_ARGUMENTS
    assert found["grad_accum_steps"] == 2
    assert found["channels_last"] is True
    assert found["torchcompile_mode"] == "max-autotune-no-cudagraphs"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_optimizer_is_the_one_that_was_probed(optimizer: str) -> None:
    from planner.training import make_optimizer

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


def test_fused_attention_is_in_the_environment() -> None:
    emitted = emit_setting(tiny("timm"), TrainSetting(attention="sdpa"), "timm")
    assert emitted.launch.startswith("TIMM_FUSED_ATTN=2 python train.py")
    assert any("TIMM_FUSED_ATTN" in warning for warning in emitted.warnings)


def test_precisions() -> None:
    assert values(tiny("timm"), precision="bf16")["amp_dtype"] == "bfloat16"
    assert values(tiny("timm"), precision="pure-bf16")["model_dtype"] == "bfloat16"
    assert values(tiny("timm"), precision="pure-bf16")["amp"] is False
    assert values(tiny("timm"), precision="tf32")["amp"] is False
    plain = emit_setting(tiny("timm"), TrainSetting(precision="fp32", world_size=2), "timm")
    assert plain.launch.startswith(
        "NVIDIA_TF32_OVERRIDE=0 torchrun --standalone --nproc-per-node 2 "
    )
