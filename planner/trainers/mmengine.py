"""mmengine, with mmpretrain's Swin: a whole config for mmpretrain's tools/train.py.

Keys as in mmengine 0.10 (`AmpOptimWrapper`, `OptimWrapper`, `Runner.cfg.compile`) and mmpretrain
1.2 (`SwinTransformer`, `SwinTransformerV2`, `ImageClassifier`, `CustomDataset`). mmpretrain's Swin
is written after microsoft's; this planner has it neither on shapes nor as a probe, and estimates
microsoft's.
"""

from __future__ import annotations

from typing import Any

from planner.core.augmentation import Augmentation
from planner.core.schema import SwinConfig, TrainSetting
from planner.core.schema.setting import EMA_DECAY
from planner.estimation.recipe import UNDECAYED, Recipe, fine_tunes, learning_rate_note, rounded
from planner.trainers.launch import (
    RESUMES,
    RESUMES_NOTE,
    launch,
    nodes_notes,
    tf32_environment,
    tf32_notes,
    torchrun,
)
from planner.trainers.loader import training_load, validation_load
from planner.trainers.parallel_source import ddp_arguments
from planner.trainers.plan import DDP_OPTIONS, Parallel, Plan, Refusal, Trainer, Written, refused
from planner.trainers.pretrained import fine_tuning_notes
from planner.trainers.source import literal

FILENAME = "swin_mmpretrain.py"

_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "rmsprop": "RMSprop",
               "nadam": "NAdam", "radam": "RAdam"}  # fmt: skip
_MEAN, _STD = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]  # of ImageNet, red first
_RAND_AUGMENT = {
    # timm's words in mmpretrain's: two operations of the increasing kind, of magnitude 9 of 10 with
    # a deviation of a half.
    "rand-m9-mstd0.5-inc1": {
        "policies": "timm_increasing", "num_policies": 2, "total_level": 10, "magnitude_level": 9,
        "magnitude_std": 0.5,
    },
}  # fmt: skip


def write(plan: Plan) -> Written:
    """`swin_mmpretrain.py`: model, data, schedule and all."""
    setting = plan.setting
    launcher = " --launcher pytorch" if setting.parallelism != "none" else ""
    rated = plan.recipe.learning_rate is not None
    rate = "" if rated else " optim_wrapper.optimizer.lr=LR"
    arguments = (
        f"{plan.path(FILENAME)}{launcher} --cfg-options train_dataloader.dataset.data_root="
        f"DATA/train val_dataloader.dataset.data_root=DATA/val{rate}"
    )
    command = torchrun("tools/train.py", plan, arguments)
    run = launch(plan, command, {**RESUMES, **tf32_environment(plan)})
    notes = (*_notes(plan), *fine_tuning_notes(plan.model, setting))
    sections = _sections(plan)
    text = "".join(f"{name} = {_written(value)}\n" for name, value in sections.items())
    more = ("DATA/train/CLASS/*.jpg and DATA/val/CLASS/*.jpg, in mmpretrain's checkout.",)
    return Written(plan.comment(run, *more, notes=notes) + text, run, notes)


def _sections(plan: Plan) -> dict[str, Any]:
    """The names that the config defines, and their values."""
    setting = plan.setting
    preprocessor = {
        "num_classes": plan.swin.num_classes,
        "mean": _MEAN,
        "std": _STD,
        "to_rgb": True,
    }
    found: dict[str, Any] = {
        "default_scope": "mmpretrain",
        "model": _model(plan),
        "data_preprocessor": preprocessor,
        "optim_wrapper": _optim_wrapper(plan),
        "param_scheduler": _schedule(plan.recipe),
        "train_cfg": {"by_epoch": True, "max_epochs": plan.recipe.epochs, "val_interval": 1},
        "val_cfg": {},
        "train_dataloader": _loader(plan, train=True),
        "val_dataloader": _loader(plan, train=False),
        "val_evaluator": {"type": "Accuracy", "topk": (1,)},
        "env_cfg": {"cudnn_benchmark": setting.cudnn_benchmark},
    }
    if setting.parallelism == "ddp":
        wrapper = {"type": "MMDistributedDataParallel", **ddp_arguments(setting)}
        found["model_wrapper_cfg"] = wrapper
    if setting.compile != "off":
        found["compile"] = {"backend": "inductor", **setting.compile_arguments}
    if setting.ema:
        # It counts batches, of which a step takes several.
        hook = {"type": "EMAHook", "momentum": rounded(1 - EMA_DECAY)}
        found["custom_hooks"] = [{**hook, "interval": setting.accumulate}]
    return found


def _loader(plan: Plan, train: bool) -> dict[str, Any]:
    """Images of a folder of classes; where it is, data_root, is given when training starts."""
    augmentation = plan.recipe.augmentation
    assert augmentation is not None, "a Swin's authors have one"
    size = plan.swin.image_size
    pipeline = [
        {"type": "LoadImageFromFile"},
        *(_augmented(size, augmentation) if train else _cropped(size, augmentation)),
        {"type": "PackInputs"},
    ]
    return {
        **(training_load(plan) if train else validation_load(plan)),
        "sampler": {"type": "DefaultSampler", "shuffle": train},
        "dataset": {"type": "CustomDataset", "data_root": "DATA", "pipeline": pipeline},
    }


def _augmented(size: tuple[int, int], augmentation: Augmentation) -> list[dict[str, Any]]:
    """As mmpretrain's imagenet_bs64_swin_224.py; OpenCV's images are blue first."""
    how = {"interpolation": augmentation.interpolation}
    mean, std = _MEAN[::-1], _STD[::-1]
    return [
        {"type": "RandomResizedCrop", "scale": size[::-1], "backend": "pillow", **how},
        {"type": "RandomFlip", "prob": 0.5, "direction": "horizontal"},
        {
            "type": "RandAugment",
            **_RAND_AUGMENT[augmentation.auto_augment],
            "hparams": {"pad_val": [round(value) for value in mean], **how},
        },
        {
            "type": "RandomErasing",
            "erase_prob": augmentation.erasing,
            "mode": "rand",
            "min_area_ratio": 0.02,
            "max_area_ratio": 1 / 3,
            "fill_color": mean,
            "fill_std": std,
        },
    ]


def _cropped(size: tuple[int, int], augmentation: Augmentation) -> list[dict[str, Any]]:
    """The longer side is what the short edge is resized for: a crop fits into any picture."""
    how = {"backend": "pillow", "interpolation": augmentation.interpolation}
    edge = int(max(size) / augmentation.crop_share)
    return [
        {"type": "ResizeEdge", "scale": edge, "edge": "short", **how},
        {"type": "CenterCrop", "crop_size": size[::-1]},
    ]


def _schedule(recipe: Recipe) -> list[dict[str, Any]]:
    """Warm-up and cosine by optimizer step; mmengine counts epochs and converts them."""
    warmup = {
        "type": "LinearLR",
        "start_factor": recipe.warmup_start,
        "by_epoch": True,
        "end": recipe.warmup_epochs,
        "convert_to_iter_based": True,
    }
    cosine = {
        "type": "CosineAnnealingLR",
        "eta_min_ratio": recipe.final_share,
        "by_epoch": True,
        "begin": recipe.warmup_epochs,
        "end": recipe.epochs,
        "T_max": recipe.epochs - recipe.warmup_epochs,
        "convert_to_iter_based": True,
    }
    return [warmup, cosine]


def _model(plan: Plan) -> dict[str, Any]:
    model, setting, recipe = plan.swin, plan.setting, plan.recipe
    architecture: dict[str, Any] = {
        "embed_dims": model.embed_dim,
        "depths": list(model.depths),
        "num_heads": list(model.num_heads),
    }
    if model.version == 2:
        architecture["extra_norm_every_n_blocks"] = 0
    backbone: dict[str, Any] = {
        "type": "SwinTransformer" if model.version == 1 else "SwinTransformerV2",
        "arch": architecture,
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
    if setting.frozen_stages:
        backbone["frozen_stages"] = setting.frozen_stages - 1  # the last of them, from 0
    if model.version == 2:
        backbone["pretrained_window_sizes"] = list(model.pretrained_windows)
    loss: dict[str, Any] = {"type": "CrossEntropyLoss", "loss_weight": 1.0}
    if recipe.smoothing:  # of soft targets as well, which Mixup and CutMix make
        loss = {"type": "LabelSmoothLoss", "label_smooth_val": recipe.smoothing, "mode": "original"}
    head = {
        "type": "LinearClsHead",
        "num_classes": model.num_classes,
        "in_channels": model.stage_channels(model.num_stages - 1),
        "init_cfg": None,  # the model's, below
        "loss": loss,
    }
    begins = [  # as Swin does; torch's layers have their own way
        {"type": "TruncNormal", "layer": "Linear", "std": 0.02, "bias": 0.0},
        {"type": "Constant", "layer": "LayerNorm", "val": 1.0, "bias": 0.0},
    ]
    mixing = {
        "augments": [
            {"type": "Mixup", "alpha": recipe.mixup},
            {"type": "CutMix", "alpha": recipe.cutmix},
        ],
        "probs": [1 - recipe.switch, recipe.switch],
    }
    return {
        "type": "ImageClassifier",
        "backbone": backbone,
        "neck": {"type": "GlobalAveragePooling"},
        "head": head,
        "init_cfg": begins,
        **({"train_cfg": mixing} if recipe.mixes else {}),
    }


def _optim_wrapper(plan: Plan) -> dict[str, Any]:
    setting = plan.setting
    optimizer: dict[str, Any] = {"type": _OPTIMIZERS[setting.optimizer_family]}
    recipe = plan.recipe
    if recipe.learning_rate is not None:
        optimizer["lr"] = recipe.learning_rate
    optimizer["weight_decay"] = recipe.weight_decay
    if setting.optimizer_family == "sgd":
        optimizer["momentum"] = 0.9
    optimizer["foreach"] = setting.optimizer_implementation == "foreach"
    if setting.optimizer_implementation == "fused":
        optimizer["fused"] = True
    wrapper: dict[str, Any] = {"type": "OptimWrapper"}
    if setting.autocast_dtype is not None:
        wrapper = {"type": "AmpOptimWrapper", "dtype": setting.autocast_dtype}
        wrapper["loss_scale"] = "dynamic" if setting.precision == "fp16" else 1.0
    wrapper |= {"optimizer": optimizer, "accumulative_counts": setting.accumulate}
    if recipe.weight_decay:
        spared = {name: {"decay_mult": 0.0} for name in UNDECAYED}
        kinds = {f"{kind}_decay_mult": 0.0 for kind in ("norm", "bias", "flat")}
        wrapper["paramwise_cfg"] = {**kinds, "custom_keys": spared}
    if recipe.clip_norm is not None:
        wrapper["clip_grad"] = {"max_norm": recipe.clip_norm}
    return wrapper


def _written(value: Any, depth: int = 0) -> str:
    """`value` in the field's own spelling: `dict(key=…)`, one key a line."""
    inner, outer = "    " * (depth + 1), "    " * depth
    if isinstance(value, list) and value and isinstance(value[0], dict):
        lines = "".join(f"{inner}{_written(entry, depth + 1)},\n" for entry in value)
        return f"[\n{lines}{outer}]"
    if not isinstance(value, dict):
        return literal(value)
    if not value:
        return "dict()"
    lines = "".join(f"{inner}{k}={_written(v, depth + 1)},\n" for k, v in value.items())
    return f"dict(\n{lines}{outer})"


def refusals(plan: Plan) -> list[Refusal]:
    """What it cannot express of the model and the setting."""
    return [
        *_model_refusals(plan.swin),
        *_optimizer_refusals(plan.setting),
        *_freezing_refusals(plan.swin, plan.setting),
    ]


def _model_refusals(model: SwinConfig) -> list[Refusal]:
    fixed = "mmpretrain's Swin takes mlp_ratio 4, qkv_bias and attn_drop_rate 0 from its backbone"
    return refused(
        (model.mlp_ratio != 4.0 or not model.qkv_bias or model.attn_drop_rate, fixed, ""),
        (not model.patch_norm, "mmpretrain's Swin always normalises its patches", ""),
    )


def _freezing_refusals(model: SwinConfig, setting: TrainSetting) -> list[Refusal]:
    """Where its `frozen_stages` freezes other weights (mmpretrain @0979e78, `_freeze_stages`)."""
    if not setting.frozen_stages:
        return []
    merging = "its version 2 counts a patch merging to the next stage, and freezes other weights"
    position = "its frozen_stages leaves the position embedding to train"
    last, norm = model.num_stages, "it freezes the last norm with the last stage"
    return refused(
        (model.version == 2, merging, "frozen_stages=0"),
        (model.absolute_position_embedding, position, "frozen_stages=0"),
        (setting.frozen_stages == last, norm, f"frozen_stages={last - 1}"),
    )


def _optimizer_refusals(setting: TrainSetting) -> list[Refusal]:
    other = (
        setting.optimizer_family not in _OPTIMIZERS or setting.optimizer_implementation == "8bit"
    )
    law = f"it registers torch's optimizers, and {setting.optimizer} is not one it knows"
    return refused((other, law, "optimizer=adamw"))


def _notes(plan: Plan) -> tuple[str, ...]:
    setting = plan.setting
    found = [
        "The estimate is of microsoft's Swin, which mmpretrain's follows: the planner has no "
        "transcription of mmpretrain's.",
        learning_rate_note(setting, plan.model),
        *nodes_notes(setting),
        "Edit this file itself: used as a second _base_ it would clash with mmpretrain's own.",
        RESUMES_NOTE,
    ]
    if plan.recipe.weight_decay:
        found.append(
            "mmengine makes a group of each weight where some have no decay: the optimizer steps "
            "one weight after the other, foreach and fused too."
        )
    if fine_tunes(setting):
        found.append(
            "mmpretrain runs frozen stages in evaluation mode, without drop path. Give it weights "
            "with --cfg-options load_from=FILE."
        )
    return (*found, *tf32_notes(plan, "mmengine has no key"))


TRAINER = Trainer(
    name="mmengine",
    title="mmengine",
    filename=FILENAME,
    write=write,
    expresses=(
        "compile",
        "compile_fullgraph",
        "frozen_stages",
        "ema",
        "cudnn_benchmark",
    ),
    refusals=refusals,
    library="microsoft",
    # Runner.wrap_model (runner/runner.py), and `no_sync` in OptimWrapper.optim_context. Its FSDP
    # strategy is version 1's, of its FlexibleRunner, and registers no hook for gradients.
    # Its launcher asks for a GPU (dist/utils.py, _init_dist_pytorch).
    parallel={"ddp": Parallel(DDP_OPTIONS - {"ddp_compression"}, needs_gpu=True)},
    models="mmpretrain",
    reads="mmcv's transforms, on OpenCV's images",
)
