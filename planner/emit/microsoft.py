"""microsoft/Swin-Transformer: a yacs YAML file for `main.py --cfg`.

Keys are those of its config.py; what it does by itself is read in main.py, optimizer.py and
utils.py: autocast is fp16 alone, with a GradScaler; the learning rate is BASE_LR × batch × world ×
accumulation / 512; gradients are clipped at 5.0; the model is always wrapped in DDP.
"""

from __future__ import annotations

from typing import Any

import yaml

from planner.emit.plan import (
    CLIP_NORM,
    CUTMIX,
    LABEL_SMOOTHING,
    MIXUP,
    Emitted,
    Plan,
    Refusal,
    blocks_alone,
    learning_rate,
    learning_rate_warning,
    unsaid,
    way_out,
)
from planner.schema import Library, SwinConfig, TrainSetting

LIBRARY: Library = "microsoft"
TITLE = "microsoft's main.py"
WRAPS_IN_DDP = True  # main.py: DistributedDataParallel around the model, whatever the world's size


def write(plan: Plan) -> Emitted:
    """`swin.yaml`."""
    setting = plan.setting
    launch = (
        f"torchrun --nproc_per_node {setting.world_size} main.py --cfg swin.yaml --data-path DATA"
    )
    values = {
        "DATA": {"BATCH_SIZE": setting.batch_size, "IMG_SIZE": plan.swin.image_size[0]},
        "MODEL": _model_values(plan.swin),
        "TRAIN": _train_values(setting),
        "AMP_ENABLE": setting.precision == "fp16",
    }
    if setting.loss == "soft-target":
        values["AUG"] = {"MIXUP": MIXUP, "CUTMIX": CUTMIX}
    if setting.loss == "label-smoothing":
        values["AUG"] = {"MIXUP": 0.0, "CUTMIX": 0.0}
        values["MODEL"]["LABEL_SMOOTHING"] = LABEL_SMOOTHING  # type: ignore[index]
    return Emitted(
        target="microsoft",
        filename="swin.yaml",
        text=plan.comment("", f"Run: {launch}") + yaml.safe_dump(values, sort_keys=False),
        launch=launch,
        warnings=(*plan.warnings, *_warnings(setting)),
    )


def _model_values(model: SwinConfig) -> dict[str, Any]:
    shape: dict[str, Any] = {
        "PATCH_SIZE": model.patch_size,
        "IN_CHANS": model.in_channels,
        "EMBED_DIM": model.embed_dim,
        "DEPTHS": list(model.depths),
        "NUM_HEADS": list(model.num_heads),
        "WINDOW_SIZE": model.windows[0],
        "MLP_RATIO": model.mlp_ratio,
        "QKV_BIAS": model.qkv_bias,
        "APE": model.absolute_position_embedding,
        "PATCH_NORM": model.patch_norm,
    }
    if model.version == 2:
        shape["PRETRAINED_WINDOW_SIZES"] = list(model.pretrained_windows)
    return {
        "TYPE": "swin" if model.version == 1 else "swinv2",
        "NAME": model.name or "swin",
        "NUM_CLASSES": model.num_classes,
        "DROP_RATE": model.drop_rate,
        "DROP_PATH_RATE": model.drop_path_rate,
        "SWIN" if model.version == 1 else "SWINV2": shape,
    }


def _train_values(setting: TrainSetting) -> dict[str, Any]:
    values: dict[str, Any] = {
        "ACCUMULATION_STEPS": setting.accumulate,
        "USE_CHECKPOINT": setting.checkpointing == "blocks",
        "OPTIMIZER": {"NAME": setting.optimizer_family},
    }
    if setting.clip_grad:
        values["CLIP_GRAD"] = CLIP_NORM
    return values


def refusals(plan: Plan) -> list[Refusal]:
    """What it cannot say of the plan's model and setting."""
    return [*_model_refusals(plan.swin), *_setting_refusals(plan.setting)]


def _model_refusals(model: SwinConfig) -> list[Refusal]:
    found = []
    if model.image_size[0] != model.image_size[1]:
        size = f"{model.image_size[0]}x{model.image_size[1]}"
        found.append(Refusal(f"its data loader makes square images, not {size}", way_out()))
    if model.attn_drop_rate:
        law = f"config.py has no key for attn_drop_rate={model.attn_drop_rate:g}"
        found.append(Refusal(law, way_out()))
    return found


def _setting_refusals(setting: TrainSetting) -> list[Refusal]:
    found = blocks_alone(setting, "main.py") + unsaid(setting, "main.py")
    if setting.precision == "bf16":
        found.append(Refusal("its autocast is fp16 alone, not bf16", way_out("precision=fp16")))
    if setting.compile != "off":
        law = f"main.py does not compile (compile={setting.compile})"
        found.append(Refusal(law, way_out("compile=off")))
    if setting.optimizer not in ("adamw", "adamw-foreach", "sgd", "sgd-foreach"):
        law = f"it knows torch's default adamw and sgd, not {setting.optimizer}"
        found.append(Refusal(law, way_out("optimizer=adamw")))
    if setting.amsgrad:
        found.append(Refusal("its adamw has no amsgrad", way_out("amsgrad=false")))
    if setting.memory_format == "channels_last":
        law = "main.py does not lay images out channels_last"
        found.append(Refusal(law, way_out("memory_format=contiguous")))
    return found


def _warnings(setting: TrainSetting) -> tuple[str, ...]:
    rate = learning_rate(setting)
    found = [
        "main.py scales the learning rate by itself: BASE_LR × "
        f"{setting.batch_size} × {setting.world_size} × {setting.accumulate} / 512"
        + (f" = {rate:g} at its BASE_LR of 0.0005. " if rate is not None else ". ")
        + "Leave TRAIN.BASE_LR alone when the batch changes."
    ]
    if rate is None:
        found.append(learning_rate_warning(setting))
    if not setting.clip_grad:
        found.append("main.py clips gradients at 5.0, and the probe did not clip.")
    if setting.precision in ("fp32", "tf32"):
        tf32 = setting.precision == "tf32"
        found.append(
            "torch multiplies matrices in plain fp32 unless told; main.py has no key for TF32: "
            "add torch.set_float32_matmul_precision('high') to it."
            if tf32
            else "torch convolves in TF32 unless told: NVIDIA_TF32_OVERRIDE=0 keeps plain fp32."
        )
    if setting.loss == "cross-entropy":
        found.append(
            "the probe's loss was plain cross-entropy; main.py mixes up images (AUG.MIXUP 0.8)."
        )
    return tuple(found)
