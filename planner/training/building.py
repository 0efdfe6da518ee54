"""The training of any model on its device, as a probe measures it and a recording records it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from planner.core.errors import PlannerError, UnsupportedError
from planner.core.schema import Model, SwinConfig, TrainSetting
from planner.core.schema.setting import DEEPSPEED
from planner.libraries.limits import FLOAT8_LEAST, FLOAT8_MULTIPLE, block_limit
from planner.libraries.torchvision import declare_missing_operators
from planner.training import train
from planner.training.levers import repeated_blocks
from planner.training.setting import step_values
from planner.training.step import Training
from planner.training.tasks import Task
from planner.training.train import Setting
from planner.training.zero import ZeroEngine

TrainingT = TypeVar("TrainingT", bound=Training)
# Of all weights that the planner trains: no figure depends on it. Lion steps by the sign alone.
RATE, LION_RATE = 1e-4, 1e-5


def recipe_of(model: Model, setting: TrainSetting) -> TrainSetting:
    """The setting with what the model's authors trained it by, where it does not say."""
    return setting.with_recipe(isinstance(model, SwinConfig))


def step_setting(model: Model, setting: TrainSetting) -> Setting:
    """`setting`, which has its recipe, in the words of `train.py`."""
    return Setting(**step_values(model, setting))


def set_precision(setting: TrainSetting) -> None:
    """What fp32 matrix work is done in, and how cuDNN chooses: `train.set_up_torch`.

    A user's module may have said otherwise when it was loaded, and by the API of torch 2.9. What
    that API set for a whole backend comes through wherever the older one says no more than "not
    tf32", and their getters raise where the two disagree; Inductor asks them. So it is unset first.
    """
    for backend in (torch.backends, torch.backends.cudnn, torch.backends.mkldnn):
        backend.fp32_precision = "none"  # type: ignore[attr-defined]
    names = ("precision", "cudnn_benchmark", "activation_memory_budget")
    train.set_up_torch(Setting(**{name: getattr(setting, name) for name in names}))


def build_training(
    kind: type[TrainingT], task: Task, model: Model, asked: TrainSetting, device: torch.device,
    to: Any = nn.Module.to,
) -> TrainingT:  # fmt: skip
    """The module of `task` on `device`, with its optimizer, its batch and its compiler; `asked`
    has its recipe. Its code, a user's not least, may have set a precision of its own while it was
    loaded.

    Raises PlannerError where a library is missing, UnsupportedError for what the module has not.
    """
    setting, made = step_setting(model, asked), task.module().train()
    named: Any = getattr(task, "blocks", None)
    blocks = None if named is None else partial(named, made)
    check_blocks(made, blocks, model, asked)
    set_precision(asked)
    with importing():
        module = prepare(made, setting, device, blocks, to)
        spread = train.distribute(module, setting, device, blocks)
        engine = ZeroEngine(asked, device) if asked.parallelism in DEEPSPEED else None
        call = train.compiled(spread, module, setting, blocks)
        batch = task.batch(asked.batch_size, device)
        weights = [p for p in module.parameters() if p.requires_grad]
        optimizers = make_optimizers(weights, task, asked, setting)
    if engine is not None:
        call = engine.begin(module, optimizers[0])
    training = kind(module, setting, task, optimizers, spread, call, asked, engine)
    training.batch = batch
    return training


def prepare(
    module: nn.Module, setting: Setting, device: torch.device,
    blocks: Callable[[], Sequence[nn.Module]] | None = None, to: Any = nn.Module.to,
) -> nn.Module:  # fmt: skip
    """`train.prepare`. Raises UnsupportedError where a lever finds nothing to take hold of."""
    try:
        found = train.prepare(module, setting, device, blocks, to)
    except ValueError as error:
        raise UnsupportedError(
            f"{type(module).__name__} cannot be checkpointed: {error}.",
            "Return a task that names its blocks, blocks(module), or choose checkpointing none.",
        ) from error
    if setting.precision == "fp8" and float8_layers(found) == 0:
        raise UnsupportedError(
            f"precision fp8 is for linear layers whose sides are multiples of {FLOAT8_MULTIPLE} "
            f"and at least {FLOAT8_LEAST}, and this model has none.",
            "Set precision=bf16.",
        )
    return found


def make_optimizers(
    weights: list[nn.Parameter], task: object, asked: TrainSetting, setting: Setting
) -> list[torch.optim.Optimizer]:
    """The task's own, or the setting's; all weights are one group, with the optimizer's decay.

    Raises UnsupportedError for an implementation that there is not.
    """
    if (own := getattr(task, "optimizer", None)) is not None:
        return [own(weights)]
    asked.check_optimizer()
    rate = LION_RATE if setting.optimizer == "lion" else RATE
    return train.build_optimizers([{"params": weights}], setting, rate)


def check_blocks(
    module: nn.Module, named: Callable[[], Sequence[nn.Module]] | None, model: Model,
    setting: TrainSetting,
) -> None:  # fmt: skip
    """Raises UnsupportedError for blocks that a setting speaks of and the module has not."""
    if not setting.checkpoints_any_model and not isinstance(model, SwinConfig):
        raise UnsupportedError(
            f"{model.title} has checkpointing none, blocks (all, blocks:6 or blocks:every-2) or "
            f"selective, not {setting.checkpointing!r}.",
            "Choose --checkpointing blocks, or name the modules in its task: blocks(module).",
        )
    if setting.chosen_blocks is None and setting.compile_scope == "model":
        return
    found = repeated_blocks(module) if named is None else named()
    if not found and setting.compile_scope == "blocks":
        raise UnsupportedError(
            f"{model.title} cannot be compiled block by block: no repeated blocks were found.",
            "Return a task that names its blocks, blocks(module), or set compile_scope=model.",
        )
    fault = block_limit(model.title, len(found), setting)
    if found and fault is not None:
        raise fault.error()


@contextmanager
def importing() -> Iterator[None]:
    """Within, timm and torchao are imported where a setting needs them; torchao would log each of
    its kernels that does not load here, and none is needed. Raises PlannerError without them."""
    declare_missing_operators()
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("timm", "torchao"):
            raise
        raise PlannerError(
            f"this setting needs {missing}, which is not installed.",
            f"Install it with: pip install 'planner[{missing}]'",
        ) from error
    finally:
        logging.disable(before)


def float8_layers(module: nn.Module) -> int:
    """How many of its linear layers multiply in 8 bits."""
    from torchao.float8.float8_linear import Float8Linear

    return sum(isinstance(layer, Float8Linear) for layer in module.modules())


def float8_notes(module: nn.Module, setting: TrainSetting) -> tuple[str, ...]:
    """What became of the linear layers of a converted module, and what their casts cost."""
    total = sum(isinstance(layer, nn.Linear) for layer in module.modules())
    notes = [f"{float8_layers(module)} of {total} linear layers multiply in 8 bits, by torchao"]
    if setting.compile == "off":
        notes.append(
            "every cast to 8 bits runs eleven operations one by one (torchao 0.18), which is meant "
            "to be compiled (compile=default)"
        )
    return tuple(notes)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor that may be sharded (by ZeRO-3 as `ds_tensor`)."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    part: torch.Tensor = getattr(tensor, "ds_tensor", tensor)
    return part
