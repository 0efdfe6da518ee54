"""Builds the training of any model, which a probe measures and a recording records."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from planner.core.errors import UnsupportedError, refuse_faults
from planner.core.schema import Model, SwinConfig, TrainSetting
from planner.core.schema.setting import DEEPSPEED
from planner.libraries.limits import block_faults
from planner.libraries.names import faults_of
from planner.libraries.torchvision import declare_missing_operators
from planner.training import train
from planner.training.levers import FLOAT8_MIN_SIDE, FLOAT8_MULTIPLE, repeated_blocks
from planner.training.setting import step_values
from planner.training.step import Training
from planner.training.tasks import Task
from planner.training.train import Setting
from planner.training.zero import ZeroEngine

TrainingT = TypeVar("TrainingT", bound=Training)
# The learning rates of every probe and recording: no figure depends on them. Lion steps by the sign
# of the gradient only.
RATE, LION_RATE = 1e-4, 1e-5


def add_recipe(model: Model, setting: TrainSetting) -> TrainSetting:
    """The setting with the recipe of the model's authors where it names nothing else."""
    return setting.with_recipe(isinstance(model, SwinConfig))


def step_setting(model: Model, setting: TrainSetting) -> Setting:
    """`setting` (with its recipe) as the `Setting` of `train.py`."""
    return Setting(**step_values(model, setting))


def set_precision(setting: TrainSetting) -> None:
    """Set the precision of fp32 matrix products, and how cuDNN chooses: `train.set_up_torch`.

    A user's module may have set something else while it was loaded, and by the API of torch 2.9.
    What that API sets for a whole backend wins wherever the older API says only "not tf32", and the
    getters raise where the two disagree; Inductor calls these. So the newer API is unset first.
    """
    for backend in (torch.backends, torch.backends.cudnn, torch.backends.mkldnn):
        backend.fp32_precision = "none"  # type: ignore[attr-defined]
    names = ("precision", "cudnn_benchmark", "activation_memory_budget")
    train.set_up_torch(Setting(**{name: getattr(setting, name) for name in names}))


def build_training(
    cls: type[TrainingT], task: Task, model: Model, setting: TrainSetting,
    device: torch.device, move: Any = nn.Module.to,
) -> TrainingT:  # fmt: skip
    """The training of a task on `device`: its module, batch and optimizers, distributed and
    compiled. `setting` has its recipe.

    Raises PlannerError where a library is missing, UnsupportedError for a lever that does not work
    on the module.
    """
    refuse_faults(faults_of(model, setting))
    script_setting, module = step_setting(model, setting), task.module().train()
    task_blocks: Any = getattr(task, "blocks", None)
    find_blocks = None if task_blocks is None else partial(task_blocks, module)
    check_blocks(module, find_blocks, model, setting)
    set_precision(setting)  # a user's code may have set another while it was loaded
    with try_imports():
        module = prepare_module(module, script_setting, device, find_blocks, move)
        parallel_model = train.distribute(module, script_setting, device, find_blocks)
        is_zero = setting.parallelism in DEEPSPEED
        engine = ZeroEngine(setting, device) if is_zero else None
        called = train.compile_model(parallel_model, module, script_setting, find_blocks)
        batch = task.batch(setting.batch_size, device)
        weights = [p for p in module.parameters() if p.requires_grad]
        optimizers = make_optimizers(weights, task, setting, script_setting)
    if engine is not None:
        called = engine.begin(module, optimizers[0])
    training = cls(
        module, script_setting, task, optimizers, parallel_model, called, setting, engine
    )
    training.batch = batch
    return training


def prepare_module(
    module: nn.Module, script_setting: Setting, device: torch.device,
    find_blocks: Callable[[], Sequence[nn.Module]] | None = None, move: Any = nn.Module.to,
) -> nn.Module:  # fmt: skip
    """`train.prepare_model`. Raises UnsupportedError where a lever finds nothing to change."""
    try:
        prepared = train.prepare_model(module, script_setting, device, find_blocks, move)
    except ValueError as error:
        raise UnsupportedError(
            f"{type(module).__name__} cannot be checkpointed: {error}.",
            "Return a task that names its blocks, blocks(module), or choose checkpointing none.",
        ) from error
    if script_setting.precision == "fp8" and float8_layers(prepared) == 0:
        raise UnsupportedError(
            f"precision fp8 is for linear layers whose sides are multiples of {FLOAT8_MULTIPLE} "
            f"and at least {FLOAT8_MIN_SIDE}, and this model has none.",
            "Set precision=bf16.",
        )
    return prepared


def make_optimizers(
    weights: list[nn.Parameter], task: object, setting: TrainSetting, script_setting: Setting
) -> list[torch.optim.Optimizer]:
    """The task's own optimizer, or those of the setting. All weights are one group, with the
    optimizer's default decay. Raises UnsupportedError for an implementation that does not exist.
    """
    if (build := getattr(task, "optimizer", None)) is not None:
        return [build(weights)]
    setting.check_optimizer()
    rate = LION_RATE if script_setting.optimizer == "lion" else RATE
    return train.build_optimizers([{"params": weights}], script_setting, rate)


def check_blocks(
    module: nn.Module, find_blocks: Callable[[], Sequence[nn.Module]] | None, model: Model,
    setting: TrainSetting,
) -> None:  # fmt: skip
    """Raise UnsupportedError for blocks that a setting needs and the module does not have."""
    if setting.chosen_blocks is None and setting.compile_scope == "model":
        return
    blocks = repeated_blocks(module) if find_blocks is None else find_blocks()
    if not blocks and setting.compile_scope == "blocks":
        raise UnsupportedError(
            f"{model.title} cannot be compiled block by block: no repeated blocks were found.",
            "Return a task that names its blocks, blocks(module), or set compile_scope=model.",
        )
    if blocks:
        refuse_faults(block_faults(model.title, len(blocks), setting))


@contextmanager
def try_imports() -> Iterator[None]:
    """A context in which a setting may import timm and torchao. Logging is off in it: torchao would
    log each of its kernels that does not load, and none is needed. Raises UnsupportedError if one
    of the two is not installed: a recording keeps that, and its key has their versions."""
    declare_missing_operators()
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("timm", "torchao"):
            raise
        raise UnsupportedError(
            f"this setting needs {missing}, which is not installed.",
            f"Install it with: pip install 'planner[{missing}]'",
        ) from error
    finally:
        logging.disable(level)


def float8_layers(module: nn.Module) -> int:
    """The number of linear layers that multiply in 8 bits."""
    from torchao.float8.float8_linear import Float8Linear

    return sum(isinstance(layer, Float8Linear) for layer in module.modules())


def float8_notes(module: nn.Module, setting: TrainSetting) -> tuple[str, ...]:
    """Notes on a converted module: how many linear layers multiply in 8 bits, and the price of the
    casts."""
    total = sum(isinstance(layer, nn.Linear) for layer in module.modules())
    notes = [f"{float8_layers(module)} of {total} linear layers multiply in 8 bits, by torchao"]
    if setting.compile == "off":
        notes.append(
            "every cast to 8 bits runs eleven operations one by one (torchao 0.18), which is meant "
            "to be compiled (compile=default)"
        )
    return tuple(notes)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor that may be sharded (by ZeRO-3 as `ds_tensor`)."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    shard: torch.Tensor = getattr(tensor, "ds_tensor", tensor)
    return shard
