"""mmengine, with mmpretrain's Swin: a config file for its tools/train.py.

Keys as in mmengine 0.10 (`AmpOptimWrapper`, `OptimWrapper`, `Runner.cfg.compile`) and mmpretrain
1.2 (`SwinTransformer`, `SwinTransformerV2`, `ImageClassifier`). mmpretrain's Swin is written after
microsoft's; this planner has it neither on shapes nor as a probe, and estimates microsoft's.
"""

from __future__ import annotations

from typing import Any

from planner.emit.plan import (
    ADAMW_WEIGHT_DECAY,
    CLIP_NORM,
    EMA_DECAY,
    LABEL_SMOOTHING,
    Emitted,
    Plan,
    Refusal,
    blocks_alone,
    learning_rate,
    learning_rate_warning,
    torchrun,
    unsaid,
    way_out,
)
from planner.schema import Library, SwinConfig, TrainSetting

LIBRARY: Library = "microsoft"
TITLE = "mmengine"

_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "rmsprop": "RMSprop",
               "nadam": "NAdam", "radam": "RAdam"}  # fmt: skip


def write(plan: Plan) -> Emitted:
    """`swin.py`, to be inherited from: your data and schedule go beside it."""
    setting = plan.setting
    launch = torchrun("tools/train.py", setting, "swin.py")
    if setting.world_size > 1:
        launch += " --launcher pytorch"
    sections = {
        "model": _model(plan.swin, setting),
        "optim_wrapper": _optim_wrapper(setting),
        "train_dataloader": {"batch_size": setting.batch_size},
    }
    if setting.validation_batch_size:
        sections["val_dataloader"] = {"batch_size": setting.validation_batch_size}
    if setting.compile != "off":
        sections["compile"] = {"backend": "inductor", "mode": setting.compile}
    text = "".join(f"{name} = {_dict(value)}\n" for name, value in sections.items())
    if setting.ema:
        hook = {"type": "EMAHook", "momentum": float(f"{1 - EMA_DECAY:.6g}")}
        text += f"custom_hooks = [{_dict(hook)}]\n"
    return Emitted(
        target="mmengine",
        filename="swin.py",
        text=plan.comment("", f"Run: {launch}") + text,
        launch=launch,
        warnings=(*plan.warnings, *_warnings(setting)),
    )


def _model(model: SwinConfig, setting: TrainSetting) -> dict[str, Any]:
    backbone: dict[str, Any] = {
        "type": "SwinTransformer" if model.version == 1 else "SwinTransformerV2",
        "arch": {
            "embed_dims": model.embed_dim,
            "depths": list(model.depths),
            "num_heads": list(model.num_heads),
        },
        "img_size": model.image_size,
        "patch_size": model.patch_size,
        "in_channels": model.in_channels,
        "window_size": model.windows[0],
        "drop_rate": model.drop_rate,
        "drop_path_rate": model.drop_path_rate,
        "use_abs_pos_embed": model.absolute_position_embedding,
        "with_cp": setting.checkpointing == "blocks",
        "out_indices": (model.num_stages - 1,),
    }
    if model.version == 2:
        backbone["pretrained_window_sizes"] = list(model.pretrained_windows)
    loss: dict[str, Any] = {"type": "CrossEntropyLoss", "loss_weight": 1.0}
    if setting.loss == "label-smoothing":
        loss = {"type": "LabelSmoothLoss", "label_smooth_val": LABEL_SMOOTHING, "mode": "original"}
    if setting.loss == "soft-target":
        loss["use_soft"] = True
    head = {
        "type": "LinearClsHead",
        "num_classes": model.num_classes,
        "in_channels": model.stage_channels(model.num_stages - 1),
        "loss": loss,
    }
    return {
        "type": "ImageClassifier",
        "backbone": backbone,
        "neck": {"type": "GlobalAveragePooling"},
        "head": head,
    }


def _optim_wrapper(setting: TrainSetting) -> dict[str, Any]:
    optimizer: dict[str, Any] = {"type": _OPTIMIZERS[setting.optimizer_family]}
    rate = learning_rate(setting)
    if rate is not None:
        optimizer["lr"] = rate
    if setting.optimizer_family == "adamw":
        optimizer["weight_decay"] = ADAMW_WEIGHT_DECAY
    if setting.optimizer_family == "sgd":
        optimizer["momentum"] = 0.9
    optimizer["foreach"] = setting.optimizer_implementation == "foreach"
    if setting.optimizer_implementation == "fused":
        optimizer["fused"] = True
    if setting.amsgrad:
        optimizer["amsgrad"] = True
    wrapper: dict[str, Any] = {"type": "OptimWrapper"}
    if setting.autocast_dtype is not None:
        wrapper = {"type": "AmpOptimWrapper", "dtype": setting.autocast_dtype}
        wrapper["loss_scale"] = "dynamic" if setting.precision == "fp16" else 1.0
    wrapper |= {"optimizer": optimizer, "accumulative_counts": setting.accumulate}
    if setting.clip_grad:
        wrapper["clip_grad"] = {"max_norm": CLIP_NORM}
    return wrapper


def _dict(value: Any, depth: int = 0) -> str:
    """`value` in the field's own spelling: `dict(key=…)`, one key a line."""
    if not isinstance(value, dict):
        return repr(value)
    inner = "    " * (depth + 1)
    lines = "".join(f"{inner}{k}={_dict(v, depth + 1)},\n" for k, v in value.items())
    return f"dict(\n{lines}{'    ' * depth})"


def refusals(plan: Plan) -> list[Refusal]:
    """What it cannot say of the plan's model and setting."""
    return [*_model_refusals(plan.swin), *_setting_refusals(plan.setting)]


def _model_refusals(model: SwinConfig) -> list[Refusal]:
    script = way_out()
    found = []
    if model.mlp_ratio != 4.0 or not model.qkv_bias or model.attn_drop_rate:
        law = "mmpretrain's Swin takes mlp_ratio 4, qkv_bias and attn_drop_rate 0 from its backbone"
        found.append(Refusal(law, script))
    if not model.patch_norm:
        found.append(Refusal("mmpretrain's Swin always normalises its patches", script))
    return found


def _setting_refusals(setting: TrainSetting) -> list[Refusal]:
    found = blocks_alone(setting, "mmengine") + unsaid(setting, "mmengine", "ema")
    if setting.optimizer_family not in _OPTIMIZERS:
        law = f"it registers torch's optimizers, and {setting.optimizer} is not one it knows"
        found.append(Refusal(law, way_out("optimizer=adamw")))
    if setting.memory_format == "channels_last":
        law = "it does not lay images out channels_last"
        found.append(Refusal(law, way_out("memory_format=contiguous")))
    return found


def _warnings(setting: TrainSetting) -> tuple[str, ...]:
    found = [
        "this planner does not know mmpretrain's own Swin: the estimate is microsoft's, after "
        "which it was written.",
        learning_rate_warning(setting),
        "add your data, schedule and train_cfg, or inherit from this file with _base_.",
    ]
    if setting.precision in ("fp32", "tf32"):
        tf32 = setting.precision == "tf32"
        found.append(
            f"mmengine has no key for TF32: {'turn it on' if tf32 else 'leave it off'} with "
            f"torch.set_float32_matmul_precision('{'high' if tf32 else 'highest'}')."
        )
    return tuple(found)
