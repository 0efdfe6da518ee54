"""timm: `args.yaml` for its train.py (`python train.py -c args.yaml`).

Keys are the `dest` names of train.py's argument parser, which `-c` sets as its defaults (timm
1.0.29.dev0, train.py; the pip package does not hold that file). What it does by itself, read there:
TF32 on and cuDNN benchmark on; `create_model` does not get `img_size`; learning rate from
`lr_base × (batch × world × grad_accum_steps / lr_base_size)` where `lr` is not given.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from planner.emit.plan import (
    BASE_LR,
    BASE_LR_IMAGES,
    CLIP_NORM,
    CUTMIX,
    EMA_DECAY,
    LABEL_SMOOTHING,
    MIXUP,
    Emitted,
    Plan,
    Refusal,
    learning_rate,
    learning_rate_warning,
    refuse,
    torchrun,
    unsaid,
    way_out,
)
from planner.schema import Library, SwinConfig, TrainSetting

LIBRARY: Library = "timm"
TITLE = "timm's train.py"

_SIZES: dict[tuple[int, tuple[int, ...]], str] = {
    (96, (2, 2, 6, 2)): "tiny",
    (96, (2, 2, 18, 2)): "small",
    (128, (2, 2, 18, 2)): "base",
    (192, (2, 2, 18, 2)): "large",
}
_S3 = {
    # What a `swin_s3_*` name stands for: depths and windows (timm 1.0.31, swin_transformer.py).
    "swin_s3_tiny_224": ((2, 2, 6, 2), (7, 7, 14, 7)),
    "swin_s3_small_224": ((2, 2, 18, 2), (14, 14, 14, 7)),
    "swin_s3_base_224": ((2, 2, 30, 2), (7, 7, 14, 7)),
}
_HEADS = {96: (3, 6, 12, 24), 128: (4, 8, 16, 32), 192: (6, 12, 24, 48)}
_V1 = re.compile(r"swin_(tiny|small|base|large)_patch4_window(\d+)_(\d+)$")
_V2 = re.compile(r"swinv2_(tiny|small|base|large)_window(?:(\d+)to)?(\d+)_(?:\d+to)?(\d+)$")
_V1_NAMES = (
    "tiny_7_224",
    "small_7_224",
    "base_7_224",
    "base_12_384",
    "large_7_224",
    "large_12_384",
)
_V2_NAMES = ("tiny_8_256", "tiny_16_256", "small_8_256", "small_16_256", "base_8_256",
             "base_16_256", "base_12_192", "large_12_192")  # fmt: skip
_OPTIMIZERS = {
    # timm's names for torch's classes: its `sgd` is Nesterov's, which was not probed.
    "adamw": "adamw", "adam": "adam", "sgd": "momentum", "lion": "lion", "rmsprop": "rmsprop",
    "nadam": "nadam", "radam": "radam",
}  # fmt: skip


def write(plan: Plan) -> Emitted:
    """`args.yaml`. Raises UnsupportedError for what train.py has no argument for."""
    setting = plan.setting
    refuse(TITLE, _refusals(setting))
    values = {**_model_values(plan.swin), **_setting_values(setting)}
    environment = _environment(setting)
    launch = " ".join((*environment, torchrun("train.py", setting, "-c args.yaml --data-dir DATA")))
    text = plan.comment("", f"Run: {launch}") + yaml.safe_dump(values, sort_keys=False)
    return Emitted(
        target="timm",
        filename="args.yaml",
        text=text,
        launch=launch,
        warnings=(*plan.warnings, *_warnings(setting)),
    )


def create_model_arguments(model: SwinConfig) -> tuple[str, dict[str, Any]]:
    """(the name, the other arguments) of `timm.create_model` that build `model`."""
    name = _published_name(model)
    return name, {
        **({"in_chans": model.in_channels} if model.in_channels != 3 else {}),
        "num_classes": model.num_classes,
        **({"drop_rate": model.drop_rate} if model.drop_rate else {}),
        "drop_path_rate": model.drop_path_rate,
        **_overrides(model, name),
    }


def _model_values(model: SwinConfig) -> dict[str, Any]:
    name = _published_name(model)
    overrides = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in _overrides(model, name).items()
    }
    height, width = model.image_size
    values: dict[str, Any] = {"model": name, "num_classes": model.num_classes}
    if height == width and model.in_channels == 3:
        values["img_size"] = height
    else:
        values["input_size"] = [model.in_channels, height, width]
    if model.in_channels != 3:
        values["in_chans"] = model.in_channels
    if overrides:
        values["model_kwargs"] = overrides
    if model.drop_rate:
        values["drop"] = model.drop_rate
    return {**values, "drop_path": model.drop_path_rate}


def _setting_values(setting: TrainSetting) -> dict[str, Any]:
    values: dict[str, Any] = {
        "batch_size": setting.batch_size,
        "grad_accum_steps": setting.accumulate,
        "grad_checkpointing": setting.checkpointing == "blocks",
        "amp": setting.autocast_dtype is not None,
    }
    if setting.autocast_dtype is not None:
        values["amp_dtype"] = setting.autocast_dtype
    if setting.precision == "pure-bf16":
        values["model_dtype"] = "bfloat16"
    if setting.compile != "off":
        values["torchcompile"] = "inductor"
        values["torchcompile_mode"] = setting.compile
    values["channels_last"] = setting.memory_format == "channels_last"
    if setting.validation_batch_size:
        values["validation_batch_size"] = setting.validation_batch_size
    return {**values, **_optimizer_values(setting), **_recipe_values(setting)}


def _optimizer_values(setting: TrainSetting) -> dict[str, Any]:
    values: dict[str, Any] = {"opt": _OPTIMIZERS[setting.optimizer_family]}
    arguments: dict[str, Any] = {}
    if setting.optimizer_implementation != "foreach":
        arguments["foreach"] = False
    if setting.optimizer_implementation == "fused":
        arguments["fused"] = True
    if setting.amsgrad:
        arguments["amsgrad"] = True
    if arguments:
        values["opt_kwargs"] = arguments
    if setting.optimizer_family == "rmsprop":
        values["momentum"] = 0.0  # train.py's 0.9 would keep one more copy of the parameters
    if setting.optimizer_family != "adamw":
        values["weight_decay"] = 0.0  # its 2e-5 makes torch copy the gradients once more
    if learning_rate(setting) is not None:
        values |= {"lr_base": BASE_LR, "lr_base_size": BASE_LR_IMAGES, "lr_base_scale": "linear"}
    return values


def _recipe_values(setting: TrainSetting) -> dict[str, Any]:
    """Clipping, averaging and the loss, where they were asked for: else the recipe stays yours."""
    values: dict[str, Any] = {}
    if setting.clip_grad:
        values |= {"clip_grad": CLIP_NORM, "clip_mode": "norm"}
    if setting.ema:
        values |= {"model_ema": True, "model_ema_decay": EMA_DECAY}
    if setting.loss == "label-smoothing":
        values["smoothing"] = LABEL_SMOOTHING
    if setting.loss == "soft-target":
        values |= {"mixup": MIXUP, "cutmix": CUTMIX}
    return values


def _refusals(setting: TrainSetting) -> list[Refusal]:
    found = unsaid(setting, "train.py", "ema", "pure-bf16")
    if setting.optimizer_family not in _OPTIMIZERS:
        found.append(
            Refusal(
                f"its {setting.optimizer_family} is timm's own, not the torch one that was probed",
                way_out("optimizer=adamw"),
            )
        )
    return found


def _environment(setting: TrainSetting) -> tuple[str, ...]:
    found = []
    if setting.attention == "sdpa":
        found.append("TIMM_FUSED_ATTN=2")
    if setting.precision == "fp32":
        found.append("NVIDIA_TF32_OVERRIDE=0")
    return tuple(found)


def _warnings(setting: TrainSetting) -> tuple[str, ...]:
    found = [learning_rate_warning(setting)]
    if learning_rate(setting) is None:
        found.append("without --lr, train.py takes its SGD rate: 0.1 for 256 images.")
    if setting.attention == "sdpa":
        found.append(
            "fused attention is off for Swin unless TIMM_FUSED_ATTN=2 is in the environment."
        )
    if setting.precision == "fp32":
        found.append(
            "train.py turns TF32 on: NVIDIA_TF32_OVERRIDE=0 in the environment keeps plain fp32."
        )
    if setting.optimizer_family != "adamw":
        found.append("weight_decay is 0, as probed.")
    if setting.loss == "cross-entropy":
        found.append(
            "the probe's loss was plain cross-entropy; train.py smooths labels by 0.1 unless told "
            "(smoothing: 0)."
        )
    return tuple(found)


def _published_name(model: SwinConfig) -> str:
    """The model's own timm name, or that of the nearest published one, to be overridden."""
    if model.library == "timm" and model.name is not None:
        return model.name.partition(".")[0]  # a tag names weights, not a shape
    size = _SIZES.get((model.embed_dim, model.depths), "tiny")
    window = model.windows[0]
    wanted = f"{size}_{window}_{max(model.image_size)}"
    if model.version == 1:
        size, window_text, image = (wanted if wanted in _V1_NAMES else f"{size}_7_224").split("_")
        return f"swin_{size}_patch4_window{window_text}_{image}"
    fallback = {"large": "large_12_192"}.get(size, f"{size}_8_256")
    size, window_text, image = (wanted if wanted in _V2_NAMES else fallback).split("_")
    return f"swinv2_{size}_window{window_text}_{image}"


def _overrides(model: SwinConfig, name: str) -> dict[str, Any]:
    """The `create_model` arguments in which `model` is not what timm's `name` stands for."""
    wanted: dict[str, Any] = {
        "img_size": _square(model.image_size),
        "patch_size": model.patch_size,
        "embed_dim": model.embed_dim,
        "depths": model.depths,
        "num_heads": model.num_heads,
        "window_size": model.window_size,
        "mlp_ratio": model.mlp_ratio,
        "qkv_bias": model.qkv_bias,
        "attn_drop_rate": model.attn_drop_rate,
    }
    if model.version == 2:
        wanted["pretrained_window_sizes"] = model.pretrained_windows
    published = _published(name)
    return {key: value for key, value in wanted.items() if value != published.get(key)}


def _square(size: tuple[int, int]) -> int | tuple[int, int]:
    return size[0] if size[0] == size[1] else size


def _published(name: str) -> dict[str, Any]:
    """What a timm name stands for, in `create_model`'s words; what it does not say is timm's
    default. Empty for a name that is not understood: then everything is overridden."""
    defaults: dict[str, Any] = {
        "patch_size": 4, "mlp_ratio": 4.0, "qkv_bias": True, "attn_drop_rate": 0.0,
    }  # fmt: skip
    if name in _S3:
        depths, windows = _S3[name]
        shape = {"img_size": 224, "depths": depths, "window_size": windows}
        return {**defaults, **shape, "embed_dim": 96, "num_heads": _HEADS[96]}
    match = _V1.match(name) or _V2.match(name)
    if match is None:
        return {}
    size, *numbers = match.groups()
    embed_dim, depths = next(shape for shape, found in _SIZES.items() if found == size)
    before = numbers[0] if len(numbers) == 3 else None
    values = {
        **defaults,
        "img_size": int(numbers[-1]),
        "window_size": int(numbers[-2]),
        "embed_dim": embed_dim,
        "depths": depths,
        "num_heads": _HEADS[embed_dim],
    }
    if len(numbers) == 3:
        # `window12to16_192to256` was trained at window 12, and 6 in the last stage.
        pretrained = (0, 0, 0, 0)
        if before:
            pretrained = (int(before), int(before), int(before), int(before) // 2)
        values["pretrained_window_sizes"] = pretrained
    return values
