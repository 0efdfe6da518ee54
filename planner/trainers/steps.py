"""Python source of what stands around a model: optimizer, schedule, mixing of images, loss."""

from __future__ import annotations

from typing import Any

from planner.core.augmentation import Augmentation
from planner.core.schema import Model, TrainSetting
from planner.core.schema.setting import (
    EMA_DECAY,
    FUSED_FAMILIES,
    OPTIMIZER_CLASSES,
    OWN_OPTIMIZER,
)
from planner.estimation.recipe import UNDECAYED, Recipe
from planner.trainers.copies import Source, sections
from planner.trainers.loader import training_load, validation_load
from planner.trainers.plan import Plan
from planner.trainers.source import SCRIPT_DEVICE, arguments, compiles_whole, literal, mapping
from planner.trainers.templates import macro

_CLASSES = {
    **{family: f"torch.optim.{name}" for family, name in OPTIMIZER_CLASSES.items()},
    "lion": "Lion", "adamw-8bit": "AdamW8bit",
}  # fmt: skip
_FUNCTIONAL = "from torch.nn import functional as F"


def optimizer_source(plan: Plan) -> Source:
    """`build_optimizer(model, lr)`: the optimizer that was probed, decay as in the recipe."""
    setting = plan.setting
    if setting.optimizer == OWN_OPTIMIZER:
        return Source(("from typing import Any",), "")
    family, implementation = setting.optimizer_family, setting.optimizer_implementation
    given: dict[str, Any] = {}
    if implementation == "8bit":
        family = setting.optimizer
    decays = family.startswith("adamw")
    if family == "sgd":
        given["momentum"] = 0.9
    if implementation != "8bit":
        given["foreach"] = implementation == "foreach"
    if implementation == "fused":
        given["fused"] = True
    elif offloads(plan) and family in FUSED_FAMILIES:
        given["fused"] = False  # torchao's own for AdamW is fused
    made = _CLASSES[family]
    keywords = "".join(f", {k}={literal(v)}" for k, v in given.items())
    if offloads(plan):
        frees = setting.offload_optimizer == "state-and-gradients"
        keywords = f", optimizer_class={made}, offload_gradients={frees}{keywords}"
        made = "CPUOffloadOptimizer"
    body = macro("decay_groups", undecayed=literal(UNDECAYED)) if decays else ""
    body += macro(
        "optimizers_in_backward" if setting.optimizer_in_backward else "optimizer",
        recipe=plan.recipe,
        decays=decays,
        made=made,
        keywords=keywords,
    )
    more = ("from torchao.optim import CPUOffloadOptimizer",) if offloads(plan) else ()
    return Source(("from typing import Any", *_optimizer_imports(family), *more), body)


def offloads(plan: Plan) -> bool:
    """Whether the optimizer is on the host of a GPU; on a CPU every one is."""
    return plan.setting.offload_optimizer != "none" and plan.device == "cuda"


def _optimizer_imports(family: str) -> tuple[str, ...]:
    lines = {
        "lion": "from timm.optim import Lion", "adamw-8bit": "from torchao.optim import AdamW8bit",
    }  # fmt: skip
    return (lines[family],) if family in lines else ()


def loader_source(plan: Plan) -> str:
    """`LOADER` and `VALIDATION_LOADER`: the arguments of a DataLoader for each."""
    validation = mapping("VALIDATION_LOADER", validation_load(plan))
    return mapping("LOADER", training_load(plan)) + validation


def rate_source(plan: Plan) -> str:
    """`LEARNING_RATE = …`, or a comment where the optimizer has no published one."""
    rate, batch = plan.recipe.learning_rate, plan.setting.global_batch
    if rate is None:
        return f"# LEARNING_RATE is yours to set, for a global batch of {batch}.\n"
    return f"LEARNING_RATE = {rate:g}  # for a global batch of {batch}\n"


def schedule_source(recipe: Recipe) -> Source:
    """`build_schedule(optimizer, steps)`: the published warm-up and cosine, over `steps`."""
    return Source(("import math",), macro("schedule", recipe=recipe))


def mixing_source(recipe: Recipe) -> Source:
    """`mix(images, targets)`: Mixup and CutMix by turns, and smoothed soft targets; nothing where
    no images are mixed."""
    if not recipe.mixes:
        return Source()
    return Source((_FUNCTIONAL, "from typing import Any"), macro("mixing", recipe=recipe))


def transforms_source(recipe: Recipe, model: Model) -> Source:
    """`train_transform()` and `validation_transform()`, for a data set of pictures."""
    assert model.image_size is not None
    usual = recipe.augmentation or Augmentation()
    body = macro(
        "transforms",
        augmentation=recipe.augmentation,
        magnitude=usual.auto_augment.split("-")[1].removeprefix("m"),
        height=model.image_size[0],
        width=model.image_size[1],
        channels=model.in_channels,
        resized=int(max(model.image_size) / usual.crop_share),
    )
    return Source(("from typing import Any",), body)


def loss_source(recipe: Recipe) -> Source:
    """`training_loss(output, targets)`; hard targets or soft ones, as `mix` gives them; and
    `is_right(output, targets)` for validation."""
    return Source(("from typing import Any", _FUNCTIONAL), macro("loss", recipe=recipe))


def step_source(plan: Plan) -> Source:
    """Transforms, optimizer, schedule and loss of a script of the user's own, and `mix` and
    `rest_scale` where it needs them."""
    recipe = plan.recipe
    pieces = [
        transforms_source(recipe, plan.model),
        optimizer_source(plan),
        schedule_source(recipe),
        loss_source(recipe),
        mixing_source(recipe),
        Source((), macro("rest") if plan.setting.accumulate > 1 else ""),
    ]
    imports = tuple(line for piece in pieces for line in piece.imports)
    return Source(imports, sections(*(piece.body for piece in pieces)))


def step_constants(plan: Plan) -> list[str]:
    """What a whole script's step reads: `AUTOCAST`, and `EMA_DECAY` and `CLIP_NORM` if needed."""
    setting = plan.setting
    dtype = setting.autocast_dtype
    lines = [f"AUTOCAST: torch.dtype | None = {f'torch.{dtype}' if dtype else None}"]
    if setting.ema:
        lines.append(f"EMA_DECAY = {EMA_DECAY}")
    if setting.clip_grad:
        lines.append(f"CLIP_NORM = {plan.recipe.clip_norm}")
    return lines


def step_values(plan: Plan) -> dict[str, Any]:
    """What `train.py.j2` takes of any step, a task's too."""
    setting, recipe = plan.setting, plan.recipe
    return {
        "setting": setting,
        "recipe": recipe,
        "optimizer": optimizer_source(plan).body,
        "decays": setting.optimizer_family == "adamw",
        "offloads": offloads(plan),
        "schedule": schedule_source(recipe).body,
        "compiled": arguments(setting.compile_arguments) if compiles_whole(setting) else "",
        "scaler": "torch.amp.GradScaler(device.type)" if setting.precision == "fp16" else "None",
        "device": SCRIPT_DEVICE[plan.device == "cuda"],
    }


def own_imports(setting: TrainSetting) -> tuple[str, ...]:
    """What a whole script's loop imports for a setting."""
    several = ("import torch.distributed as dist",) if setting.parallelism != "none" else ()
    return (*several, *(("from contextlib import contextmanager",) if setting.ema else ()))
