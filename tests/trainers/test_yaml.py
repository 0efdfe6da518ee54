"""timm's args.yaml, against train.py's arguments and the factories that timm installs; and the YAML
in yacs, merged into the key tree of the authors' config.py.

The names that these trainers know are recorded here, as no package installs what reads them: facts,
each with where it was read.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml
from yacs.config import CfgNode

from planner.core.errors import UnsupportedError
from planner.core.schema import NamedModel, SwinConfig, TrainSetting
from planner.libraries.torchvision import declare_missing_operators
from planner.trainers.emission import emit, emit_setting
from tests.steps import build_real
from tests.trainers.cases import recommendation, tiny

declare_missing_operators()
import timm  # noqa: E402
import timm.optim  # noqa: E402
import torch  # noqa: E402

# huggingface/pytorch-image-models train.py at aa4b585 (timm 1.0.29.dev0): the `dest` of arguments,
# which `-c args.yaml` overrides through `parser.set_defaults`: those that concern the model, data,
# device, optimizer, loss and averaging. That train.py itself trained for an epoch with an emitted
# file, by hand (tiny model, CPU, 2026-11-20).
_TIMM = """
data data_dir dataset train_split val_split class_map model pretrained initial_checkpoint
resume num_classes gp img_size in_chans input_size crop_pct batch_size validation_batch_size
channels_last fuser grad_accum_steps grad_checkpointing fast_norm model_kwargs torchcompile_mode
torchscript torchcompile device amp amp_dtype model_dtype no_ddp_bb synchronize_step opt opt_eps
opt_betas momentum weight_decay clip_grad clip_mode layer_decay opt_kwargs sched lr lr_base
lr_base_size lr_base_scale warmup_lr min_lr epochs warmup_epochs warmup_prefix sched_on_updates
aa color_jitter reprob remode recount train_interpolation interpolation smoothing mixup cutmix
mixup_prob mixup_switch_prob drop drop_path drop_block model_ema model_ema_force_cpu
model_ema_decay seed workers worker_seeding pin_mem no_prefetcher use_multi_epochs_loader output
"""
TIMM_ARGUMENTS = frozenset(_TIMM.split())


def microsoft_config() -> dict[str, Any]:
    """The key tree of microsoft/Swin-Transformer config.py at f82860b, with a value of each key's
    type (yacs refuses unknown keys and other types)."""
    shape = {
        "PATCH_SIZE": 4, "IN_CHANS": 3, "EMBED_DIM": 96, "DEPTHS": [2], "NUM_HEADS": [3],
        "WINDOW_SIZE": 7, "MLP_RATIO": 4.0, "QKV_BIAS": True, "APE": False, "PATCH_NORM": True,
    }  # fmt: skip
    return {
        "BASE": [""],
        "DATA": {
            "BATCH_SIZE": 128, "DATA_PATH": "", "DATASET": "imagenet", "IMG_SIZE": 224,
            "INTERPOLATION": "bicubic", "PIN_MEMORY": True, "NUM_WORKERS": 8,
        },
        "MODEL": {
            "TYPE": "swin", "NAME": "", "NUM_CLASSES": 1000, "DROP_RATE": 0.0,
            "DROP_PATH_RATE": 0.1, "LABEL_SMOOTHING": 0.1,
            "SWIN": {**shape, "QK_SCALE": None},
            "SWINV2": {**shape, "PRETRAINED_WINDOW_SIZES": [0]},
        },
        "TRAIN": {
            "EPOCHS": 300, "WARMUP_EPOCHS": 20, "WEIGHT_DECAY": 0.05, "BASE_LR": 5e-4,
            "WARMUP_LR": 5e-7, "MIN_LR": 5e-6,
            "LR_SCHEDULER": {"NAME": "cosine", "WARMUP_PREFIX": True},
            "CLIP_GRAD": 5.0, "ACCUMULATION_STEPS": 1, "USE_CHECKPOINT": False,
            "OPTIMIZER": {"NAME": "adamw", "EPS": 1e-8, "BETAS": (0.9, 0.999), "MOMENTUM": 0.9},
        },
        "AUG": {
            "COLOR_JITTER": 0.4, "AUTO_AUGMENT": "rand-m9-mstd0.5-inc1", "REPROB": 0.25,
            "REMODE": "pixel", "RECOUNT": 1, "MIXUP": 0.8, "CUTMIX": 1.0, "CUTMIX_MINMAX": None,
            "MIXUP_PROB": 1.0, "MIXUP_SWITCH_PROB": 0.5, "MIXUP_MODE": "batch",
        },
        "TEST": {"CROP": True},
        "AMP_ENABLE": True,
    }  # fmt: skip


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
    from planner.training.assembly import make_optimizers, step_setting

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


def merged(model: SwinConfig, folder: Path, **fields: Any) -> CfgNode:
    """config.py's defaults with the emitted file over them, as its update_config does."""
    model = model.model_copy(update={"num_classes": 1000})
    setting = TrainSetting(**{"batch_size": 16, "precision": "fp16", **fields})
    file = folder / "swin.yaml"
    file.write_text(emit_setting(model, setting, "microsoft").text)
    config = CfgNode(microsoft_config())
    config.merge_from_file(str(file))
    return config


@pytest.mark.parametrize("version", [1, 2])
def test_every_key_is_config_py_s(version: int, tmp_path: Path) -> None:
    model = tiny("microsoft", version, drop_path_rate=0.3)
    config = merged(
        model, tmp_path, accumulate=4, checkpointing="blocks", clip_grad=True,
        loss="soft-target",
    )  # fmt: skip
    assert config.DATA.BATCH_SIZE == 16
    assert config.DATA.IMG_SIZE == 32
    assert config.TRAIN.ACCUMULATION_STEPS == 4
    assert config.TRAIN.USE_CHECKPOINT is True
    assert config.TRAIN.OPTIMIZER.NAME == "adamw"
    assert config.TRAIN.WEIGHT_DECAY == 0.05
    assert config.TRAIN.CLIP_GRAD == 5.0
    assert config.AMP_ENABLE is True
    wanted = {1: "swin", 2: "swinv2"}[version]
    assert wanted == config.MODEL.TYPE
    assert config.MODEL.DROP_PATH_RATE == 0.3
    assert config.MODEL.NUM_CLASSES == 1000
    shape = config.MODEL.SWIN if version == 1 else config.MODEL.SWINV2
    assert shape.WINDOW_SIZE == 4
    assert shape.DEPTHS == [2, 2]
    assert merged(model, tmp_path, precision="fp32").AMP_ENABLE is False


def test_main_py_s_gradient_buckets_are_counted_even_for_the_setting_that_was_probed() -> None:
    """main.py wraps the model in DDP on one device too, which a probe does not."""
    found = recommendation(
        tiny("microsoft", num_classes=1000), TrainSetting(batch_size=16, precision="fp16")
    )
    emitted = emit(found, "microsoft")
    assert "main.py trains under DDP" in " ".join(emitted.text.split())
