"""Python source of what stands around a model: optimizer, schedule, mixing of images, loss."""

from __future__ import annotations

from string import Template
from typing import Any

from planner.schema import TrainSetting
from planner.schema.setting import EMA_DECAY, LABEL_SMOOTHING
from planner.trainers.copies import Source
from planner.trainers.loader import training_load, validation_load
from planner.trainers.plan import Plan
from planner.trainers.recipe import (
    CUTMIX,
    EPOCHS,
    FINAL_SHARE,
    MIXUP,
    WARMUP_EPOCHS,
    WARMUP_START,
    recipe_of,
)
from planner.trainers.source import literal, mapping

_CLASSES = {
    "adamw": "torch.optim.AdamW", "adam": "torch.optim.Adam", "sgd": "torch.optim.SGD",
    "adafactor": "torch.optim.Adafactor", "rmsprop": "torch.optim.RMSprop",
    "nadam": "torch.optim.NAdam", "radam": "torch.optim.RAdam", "lion": "Lion",
    "adamw-8bit": "AdamW8bit",
}  # fmt: skip
_FUNCTIONAL = "from torch.nn import functional as F"


def optimizer_source(setting: TrainSetting) -> Source:
    """`build_optimizer(model, lr)`: the optimizer that was probed, decay as in the recipe."""
    family, implementation = setting.optimizer_family, setting.optimizer_implementation
    arguments: dict[str, Any] = {}
    if implementation == "8bit":
        family = setting.optimizer
    if family.startswith("adamw"):
        arguments["weight_decay"] = recipe_of(setting).weight_decay
    if family == "sgd":
        arguments["momentum"] = 0.9
    if setting.amsgrad:
        arguments["amsgrad"] = True
    if implementation != "8bit":
        arguments["foreach"] = implementation == "foreach"
    if implementation == "fused":
        arguments["fused"] = True
    keywords = "".join(f", {k}={literal(v)}" for k, v in arguments.items())
    if setting.optimizer_in_backward:
        body = _IN_BACKWARD.substitute(made=f"{_CLASSES[family]}([parameter], lr=lr{keywords})")
        return Source(_optimizer_imports(family), body)
    body = (
        "def build_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:\n"
        "    parameters = [p for p in model.parameters() if p.requires_grad]\n"
        f"    return {_CLASSES[family]}(parameters, lr=lr{keywords})\n"
    )
    return Source(_optimizer_imports(family), body)


def _optimizer_imports(family: str) -> tuple[str, ...]:
    lines = {
        "lion": "from timm.optim import Lion", "adamw-8bit": "from torchao.optim import AdamW8bit",
    }  # fmt: skip
    return (lines[family],) if family in lines else ()


_IN_BACKWARD = Template(
    '''def build_optimizers(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """One for each trained weight, which backward updates as soon as it has its gradient."""
    optimizers: dict[torch.Tensor, torch.optim.Optimizer] = {}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        if parameter.requires_grad:
            optimizers[parameter] = $made
            parameter.register_post_accumulate_grad_hook(update)
    return list(optimizers.values())
'''
)


def update_source(setting: TrainSetting, module: str) -> str:
    """What follows the backwards of a step: gradients clipped, all weights of `module` updated,
    their average moved, gradients let go. In backward the weights were updated already."""
    clip, average = "", ""
    if setting.clip_grad:
        trained = f"[p for p in {module}.parameters() if p.requires_grad]"
        clip = f"""    if scaler is not None:
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_({trained}, CLIP_NORM)
"""
    if setting.ema:
        average = f"""    with torch.no_grad():
        torch._foreach_lerp_(average, list({module}.parameters()), 1 - EMA_DECAY)
"""
    if setting.optimizer_in_backward:
        return average
    return f"""{clip}    if scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
{average}    optimizer.zero_grad(set_to_none={setting.zero_grad_to_none})
"""


def loader_source(plan: Plan) -> str:
    """`LOADER` and `VALIDATION_LOADER`: the arguments of a DataLoader for each."""
    validation = mapping("VALIDATION_LOADER", validation_load(plan))
    return mapping("LOADER", training_load(plan)) + validation


def rate_source(setting: TrainSetting) -> str:
    """`LEARNING_RATE = …`, or a comment where the optimizer has no published one."""
    rate = recipe_of(setting).learning_rate
    if rate is None:
        return f"# LEARNING_RATE is yours to set, for a global batch of {setting.global_batch}.\n"
    return f"LEARNING_RATE = {rate:g}  # for a global batch of {setting.global_batch}\n"


SCHEDULE = Source(
    ("import math",),
    f'''def build_schedule(
    optimizer: torch.optim.Optimizer, steps: int, warmup: int = 0
) -> torch.optim.lr_scheduler.LambdaLR:
    """A linear warm-up over the first optimizer steps, then half a cosine.

    `warmup` steps, or {WARMUP_EPOCHS}/{EPOCHS} of all where none are given.
    """
    warmup = max(1, warmup or steps * {WARMUP_EPOCHS} // {EPOCHS})

    def rate(step: int) -> float:
        if step < warmup:
            return {WARMUP_START} + (1 - {WARMUP_START}) * step / warmup
        share = min(1.0, (step - warmup) / max(1, steps - warmup))
        return {FINAL_SHARE} + (1 - {FINAL_SHARE}) * 0.5 * (1 + math.cos(math.pi * share))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
''',
)
"""`build_schedule(optimizer, steps)`: the published warm-up and cosine, over `steps`."""


MIXING = Source(
    (_FUNCTIONAL,),
    f'''\
def mix(images: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mixup or CutMix of a batch with itself, turned round; targets [batch, classes] are soft."""
    soft = F.one_hot(targets, NUM_CLASSES).float()
    soft = (1 - {LABEL_SMOOTHING}) * soft + {LABEL_SMOOTHING} / NUM_CLASSES
    if torch.rand(()) < 0.5:
        share = float(torch.distributions.Beta({MIXUP}, {MIXUP}).sample())
        images = share * images + (1 - share) * images.flip(0)
    else:
        side = (1 - float(torch.distributions.Beta({CUTMIX}, {CUTMIX}).sample())) ** 0.5
        height, width = images.shape[2:]
        down, across = int(height * side), int(width * side)
        top = int(torch.randint(height - down + 1, ()))
        left = int(torch.randint(width - across + 1, ()))
        cut = (slice(None), slice(None), slice(top, top + down), slice(left, left + across))
        other = images.flip(0)
        images = images.clone()
        images[cut] = other[cut]
        share = 1 - down * across / (height * width)
    return images, share * soft + (1 - share) * soft.flip(0)
''',
)
"""`mix(images, targets)`: Mixup and CutMix by turns, and smoothed soft targets."""


def loss_source(setting: TrainSetting) -> Source:
    """`training_loss(output, targets)`; hard targets or soft ones, as `mix` gives them."""
    smoothing = f", label_smoothing={LABEL_SMOOTHING}" if setting.loss == "label-smoothing" else ""
    body = (
        "def training_loss(output: Any, targets: torch.Tensor) -> torch.Tensor:\n"
        '    logits = getattr(output, "logits", output)\n'
        f"    return F.cross_entropy(logits, targets{smoothing})\n"
    )
    return Source(("from typing import Any", _FUNCTIONAL), body)


def step_source(setting: TrainSetting) -> Source:
    """Optimizer, schedule and loss of a script of the user's own, and `mix` where it needs that."""
    pieces = [optimizer_source(setting), SCHEDULE, loss_source(setting)]
    if recipe_of(setting).mixes:
        pieces.append(MIXING)
    imports = tuple(line for piece in pieces for line in piece.imports)
    return Source(imports, "\n\n".join(piece.body for piece in pieces))


def step_constants(setting: TrainSetting) -> list[str]:
    """What a whole script's step reads: `AUTOCAST`, and `EMA_DECAY` and `CLIP_NORM` if needed."""
    dtype = setting.autocast_dtype
    lines = [f"AUTOCAST: torch.dtype | None = {f'torch.{dtype}' if dtype else None}"]
    if setting.ema:
        lines.append(f"EMA_DECAY = {EMA_DECAY}")
    if setting.clip_grad:
        lines.append(f"CLIP_NORM = {recipe_of(setting).clip_norm}")
    return lines
