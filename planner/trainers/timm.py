"""timm: `args.yaml` for its train.py (`python train.py -c args.yaml`).

The keys are the `dest` names of train.py's argument parser, which `-c` sets as its defaults
(huggingface/pytorch-image-models @aa4b585, timm 1.0.29.dev0; the package does not hold that file).
What train.py does by itself was read there: TF32 and cuDNN benchmark on, labels smoothed by 0.1,
weight decay 2e-5, a warm-up from 1e-5 whatever the batch, no auto-augment nor erasing, crops
resized by bilinear or bicubic at random; `create_model` does not get `img_size`. Biases, norms and
what a model's `no_weight_decay` names are not decayed.

A Swin is described in full. Any other model of timm that maps images to logits is only named, and
its recipe is that of train.py, except for what the setting requests.
"""

from typing import Any

from planner.core.errors import Fault
from planner.core.schema import NamedModel, SwinConfig
from planner.core.schema.setting import EMA_DECAY
from planner.libraries.timm.spec import SPEC
from planner.trainers.faults import IN_THE_LOOP, IN_THE_STEP
from planner.trainers.launch import OLD_PILLOW, launch_line, node_notes, torchrun_line, train_loader
from planner.trainers.plan import Plan, Support, Trainer, Written, list_faults
from planner.trainers.recipe import Recipe, learning_rate_note, round_rate

FILENAME = "args.yaml"

_ARGUMENTS = {
    # A field of SwinConfig, and what `create_model` calls it where it differs from the name's own.
    "image_size": "img_size", "patch_size": "patch_size", "embed_dim": "embed_dim",
    "depths": "depths", "num_heads": "num_heads", "window_size": "window_size",
    "mlp_ratio": "mlp_ratio", "qkv_bias": "qkv_bias", "attn_drop_rate": "attn_drop_rate",
    "pretrained_windows": "pretrained_window_sizes",
}  # fmt: skip
_OPTIMIZERS = {
    # timm's names for torch's classes: its `sgd` is Nesterov's, which was not probed.
    "adamw": "adamw", "adam": "adam", "sgd": "momentum", "lion": "lion", "rmsprop": "rmsprop",
    "nadam": "nadam", "radam": "radam",
}  # fmt: skip


def write(plan: Plan) -> Written:
    """`args.yaml`."""
    model = plan.model
    values = _named_values(model) if isinstance(model, NamedModel) else _model_values(plan.swin)
    values |= _setting_values(plan)
    rate = "" if plan.recipe.learning_rate is not None else " --lr LR"
    arguments = f"-c {plan.path(FILENAME)} --data-dir DATA{rate}"
    command = launch_line(plan, torchrun_line("train.py", plan, arguments), _environment(plan))
    layout = "DATA/train/CLASS/*.jpg and DATA/validation/CLASS/*.jpg; start it in timm's checkout."
    advice = (layout, OLD_PILLOW) if plan.recipe.augmentation else (layout,)
    return plan.write_yaml(values, command, advice, _notes(plan))


def create_model_arguments(model: SwinConfig) -> tuple[str, dict[str, Any]]:
    """The name and the other arguments with which `timm.create_model` builds `model`."""
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
    overrides = {key: _without_tuples(value) for key, value in _overrides(model, name).items()}
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


def _named_values(model: NamedModel) -> dict[str, Any]:
    """The model as the probe built it (`planner.libraries.timm.spec`), with its own drop path."""
    assert model.image_size is not None
    size = [model.in_channels, *model.image_size]
    return {"model": model.name, "num_classes": model.num_classes, "input_size": size}


def _without_tuples(value: Any) -> Any:
    """`value` with lists for its tuples, which YAML does not have."""
    return [_without_tuples(item) for item in value] if isinstance(value, tuple) else value


def _setting_values(plan: Plan) -> dict[str, Any]:
    setting = plan.setting
    values: dict[str, Any] = {
        "batch_size": setting.batch_size,
        "grad_accum_steps": setting.accumulate,
        "validation_batch_size": setting.batch_size,
        "grad_checkpointing": setting.checkpointing == "blocks",
        "amp": setting.autocast_dtype is not None,
    }
    if plan.device == "cpu":
        values["device"] = "cpu"
    if setting.autocast_dtype is not None:
        values["amp_dtype"] = setting.autocast_dtype
    if setting.precision == "pure-bf16":
        values["model_dtype"] = "bfloat16"
    if setting.compile != "off":
        values["torchcompile"] = "inductor"
        values["torchcompile_mode"] = setting.compile
    values["channels_last"] = setting.memory_format == "channels_last"
    values |= _loader_values(plan)
    if setting.parallelism == "ddp":
        values["no_ddp_bb"] = False
    values |= _optimizer_values(plan)
    if not isinstance(plan.model, NamedModel):
        values |= {"weight_decay": plan.recipe.weight_decay, **_schedule_values(plan.recipe)}
    return {**values, **_loss_values(plan), **_augmentation_values(plan.recipe)}


def _loader_values(plan: Plan) -> dict[str, Any]:
    """The loader. `use_multi_epochs_loader` lets workers live on into the next epoch. There is at
    least one worker, which the persistent workers of timm before 1.0.31 need."""
    loader = train_loader(plan)
    return {
        "workers": max(1, loader.workers),
        "pin_mem": loader.pin_memory,
        "no_prefetcher": False,
        "use_multi_epochs_loader": loader.persistent_workers,
    }


def _optimizer_values(plan: Plan) -> dict[str, Any]:
    setting = plan.setting
    values: dict[str, Any] = {"opt": _OPTIMIZERS[setting.optimizer_family]}
    arguments: dict[str, Any] = {}
    if setting.optimizer_implementation != "foreach":
        arguments["foreach"] = False
    if setting.optimizer_implementation == "fused":
        arguments["fused"] = True
    if arguments:
        values["opt_kwargs"] = arguments
    if setting.optimizer_family == "rmsprop":
        values["momentum"] = 0.0  # train.py's 0.9 would keep one more copy of the parameters
    return values


def _schedule_values(recipe: Recipe) -> dict[str, Any]:
    """The learning rate of each optimizer step, also where it is the default of train.py."""
    values: dict[str, Any] = {
        "sched": "cosine",
        "sched_on_updates": True,
        "epochs": recipe.epochs - recipe.warmup_epochs,  # train.py adds the warm-up to them
        "warmup_epochs": recipe.warmup_epochs,
        "warmup_prefix": True,
        "warmup_lr": 0.0,
    }
    if recipe.learning_rate is not None:
        values |= {
            "lr": recipe.learning_rate,
            "warmup_lr": round_rate(recipe.learning_rate * recipe.warmup_start),
            "min_lr": round_rate(recipe.learning_rate * recipe.final_share),
        }
    return values


def _loss_values(plan: Plan) -> dict[str, Any]:
    """Smoothing and mixing, clipping and averaging; for a named model only what its setting
    requests."""
    setting, recipe = plan.setting, plan.recipe
    values: dict[str, Any] = {}
    if recipe.smoothing or not isinstance(plan.model, NamedModel):  # else train.py's own hold
        values |= {"smoothing": recipe.smoothing, "mixup": recipe.mixup, "cutmix": recipe.cutmix}
    if recipe.mixes:
        values["mixup_switch_prob"] = recipe.switch
    if recipe.clip_norm is not None:
        values |= {"clip_grad": recipe.clip_norm, "clip_mode": "norm"}
    if setting.ema:
        values |= {"model_ema": True, "model_ema_decay": EMA_DECAY}
    return values


def _augmentation_values(recipe: Recipe) -> dict[str, Any]:
    """The augmentation. The modes and counts are written too, so that they stay the authors' if
    train.py changes its defaults."""
    augmentation = recipe.augmentation
    if augmentation is None:
        return {}
    return {
        "aa": augmentation.auto_augment,
        "color_jitter": augmentation.color_jitter,
        "reprob": augmentation.erasing,
        "remode": "pixel",
        "recount": 1,
        "train_interpolation": augmentation.interpolation,
        "interpolation": augmentation.interpolation,
        "crop_pct": augmentation.crop_share,
    }


def faults(plan: Plan) -> list[Fault]:
    """The optimizers whose code in timm is not what was probed."""
    family, kind = plan.setting.optimizer_family, plan.setting.optimizer_implementation
    law_8bit = "its 8-bit optimizers are bitsandbytes', not torchao's adamw-8bit that was probed"
    law_family = f"its {family} is timm's own, not the torch one that was probed"
    return list_faults(
        (kind == "8bit", law_8bit, "optimizer=adamw"),
        (family not in _OPTIMIZERS, law_family, "optimizer=adamw"),
    )


def _environment(plan: Plan) -> dict[str, str]:
    environment = {}
    if plan.setting.attention == "sdpa":
        environment["TIMM_FUSED_ATTN"] = "2"
    if plan.setting.attention == "eager" and isinstance(plan.model, NamedModel):
        environment["TIMM_FUSED_ATTN"] = "0"
    if plan.setting.precision == "fp32" and plan.device == "cuda":
        environment["NVIDIA_TF32_OVERRIDE"] = "0"
    return environment


def _notes(plan: Plan) -> tuple[str, ...]:
    setting = plan.setting
    notes = [learning_rate_note(setting, plan.model), *node_notes(setting)]
    if setting.attention == "sdpa":
        notes.append(
            "Fused attention is off for Swin unless TIMM_FUSED_ATTN=2 is in the environment."
        )
    if setting.precision == "fp32" and plan.device == "cuda":
        notes.append(
            "train.py turns TF32 on: NVIDIA_TF32_OVERRIDE=0 in the environment keeps plain fp32."
        )
    if setting.compile != "off":
        notes.append(
            "train.py compiles without dynamic=False, which planner's step has: a batch of another "
            "size compiles again."
        )
    if plan.loader is not None and not plan.loader.workers:
        notes.append("It loads with 1 worker, not in the training process as was measured.")
    model_notes = _named_notes(plan) if isinstance(plan.model, NamedModel) else _swin_notes(plan)
    return (*notes, *model_notes)


def _named_notes(plan: Plan) -> list[str]:
    notes = [
        "This file does not set the schedule, weight decay, augmentation and the rest of a recipe: "
        "the defaults of train.py and of the model hold.",
        "train.py gives input_size to the data only: to train a model of one size, as a ViT is, at "
        "another, add model_kwargs: {img_size: [HEIGHT, WIDTH]}.",
    ]
    if plan.setting.checkpointing != "none":
        notes.append(
            "train.py checkpoints what the model's own set_grad_checkpointing does, and planner's "
            "step each repeated block: memory may differ."
        )
    return notes


def _swin_notes(plan: Plan) -> list[str]:
    model, recipe = plan.swin, plan.recipe
    notes = [
        f"{recipe.warmup_epochs} epochs of warm-up come before the "
        f"{recipe.epochs - recipe.warmup_epochs} of `epochs`."
    ]
    if model.version == 2 or isinstance(model.window_size, tuple):
        # Decay of logit_scale, a window for each of two stages, images that are not square.
        notes.append("Take timm 1.0.31 or later, and a checkout of that.")
    return notes


def _published_name(model: SwinConfig) -> str:
    """The model's own timm name, or that of the published model with the fewest overrides."""
    if model.library == "timm" and model.name is not None:
        name = model.name.partition(".")[0]  # a tag names weights, not a shape
        if name in SPEC.published:
            return name
    candidates = (n for n, config in SPEC.published.items() if config.version == model.version)
    return min(candidates, key=lambda name: len(_overrides(model, name)))


def _overrides(model: SwinConfig, name: str) -> dict[str, Any]:
    """The `create_model` arguments in which `model` differs from timm's `name`."""
    published = SPEC.published[name]
    overrides = {
        argument: getattr(model, field)
        for field, argument in _ARGUMENTS.items()
        if getattr(model, field) != getattr(published, field)
    }
    if model.version == 1:
        overrides.pop("pretrained_window_sizes", None)
    if isinstance(overrides.get("window_size"), tuple):
        # A pair for each stage: timm reads two bare numbers as one window's height and width.
        overrides["window_size"] = tuple((window, window) for window in model.windows)
    return overrides


TRAINER = Trainer(
    name="timm",
    title="timm's train.py",
    filename=FILENAME,
    write=write,
    lacks=(*IN_THE_STEP, *IN_THE_LOOP),
    faults=faults,
    library="timm",
    # train.py: NativeDDP with torch's own options, and `no_sync` where it accumulates.
    # On the CPU it gives DDP `device_ids=[cpu]`, which DDP refuses.
    parallel={"ddp": Support(needs_gpu=True)},
    trains_named=True,
    # create_loader's own (timm/data/loader.py), for which train.py has no argument.
    own_loader="timm's transforms, prefetch 2",
)
