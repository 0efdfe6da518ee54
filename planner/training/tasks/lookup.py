"""The task of a model, or of the value that a user's factory returned."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from planner.core.errors import ContractError, PlannerError, UnsupportedError, alternatives
from planner.core.schema import FactoryModel, Model, NamedModel, TrainSetting, parse
from planner.core.schema.setting import OWN_OPTIMIZER
from planner.core.schema.validation import UNIT
from planner.libraries.factories import make_builder
from planner.libraries.transformers import find_form
from planner.training.tasks.contract import (
    METHODS,
    Task,
    all_tensors,
    check_loss,
    describe,
    guard_call,
    is_task,
    missing_methods,
    prepare_batch,
)
from planner.training.tasks.example import from_example, from_lightning, is_lightning
from planner.training.tasks.vision import Classification, Detection, Segmentation

MASKED_SHARE = 0.6  # of the patches: SimMIM's best (arXiv 2111.09886 §4.1.2)


class OwnLoss:
    """The task of a transformers model, which computes its loss by itself: `module(**batch).loss`,
    with random inputs of the model's sizes and labels of its configuration.

    Sequences have full length, so there is no padding and no attention mask.
    """

    def __init__(self, module: nn.Module, model: NamedModel) -> None:
        form = find_form(type(module))
        assert form is not None, "looked up"
        self._module, self.model, self.form = module, model, form
        self.config: Any = module.config
        is_text = model.sequence_length is not None
        self.unit = "sequences" if is_text else "clips" if model.num_frames else "images"

    def module(self) -> nn.Module:
        return self._module

    def batch(self, size: int, device: torch.device) -> dict[str, Tensor]:
        """Token ids [B, L], images [B, C, H, W] or clips [B, T, C, H, W], and their labels."""
        if self.model.sequence_length is not None:
            return self._tokens(size, self.model.sequence_length, device)
        return self._images(size, device)

    def loss(self, module: Any, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = module(**batch).loss
        return loss

    def _tokens(self, size: int, length: int, device: torch.device) -> dict[str, Tensor]:
        ids = torch.randint(self.config.vocab_size, (size, length), device=device)
        if self.form == "ForSequenceClassification":
            labels = torch.randint(self.config.num_labels, (size,), device=device)
        elif self.form == "ForTokenClassification":
            labels = torch.randint(self.config.num_labels, (size, length), device=device)
        else:
            labels = torch.randint(self.config.vocab_size, (size, length), device=device)
        return {"input_ids": ids, "labels": labels}

    def _images(self, size: int, device: torch.device) -> dict[str, Tensor]:
        assert self.model.image_size is not None
        assert self.model.in_channels is not None
        height, width = self.model.image_size
        frames = () if self.model.num_frames is None else (self.model.num_frames,)
        shape = (size, *frames, self.model.in_channels, height, width)
        images = {"pixel_values": torch.randn(shape, device=device)}
        if self.form == "ForMaskedImageModeling":
            patches = (height // self.config.patch_size) * (width // self.config.patch_size)
            masked = torch.rand(size, patches, device=device) < MASKED_SHARE
            return {**images, "bool_masked_pos": masked}
        per_item = (height, width) if self.form == "ForSemanticSegmentation" else ()
        labels = torch.randint(self.config.num_labels, (size, *per_item), device=device)
        return {**images, "labels": labels}


_TASKS: dict[str, Callable[[nn.Module, NamedModel], Task]] = {
    "segmentation": Segmentation,
    "detection": Detection,
    "own-loss": OwnLoss,
}


def task_for(model: Model, setting: TrainSetting) -> Task:
    """The task of any model: that of its library, or the one that the user's factory returns.

    Builds the module. Raises PlannerError where it cannot be built, and UnsupportedError for a
    setting that only the task itself can decide.
    """
    return as_task(make_builder(model, setting)(), model, setting)


def load_task(model: Mapping[str, Any], setting: Mapping[str, Any]) -> Task:
    """The task of a model and a setting, given by their fields. An emitted file calls this."""
    kind: Any = FactoryModel if "factory" in model else NamedModel
    return task_for(parse(kind, model, "the model"), parse(TrainSetting, setting, "the setting"))


def as_task(built: Any, model: Model, setting: TrainSetting) -> Task:
    """The task of what was built for `model`: a module, a task, or (module, batch, loss).

    Raises UnsupportedError for a setting that is the task's own matter.
    """
    if isinstance(built, nn.Module) and not is_lightning(built):
        kind = model.task if isinstance(model, NamedModel) else "classification"
        if kind in ("classification", "video"):
            return Classification(built, model, setting)
        assert isinstance(model, NamedModel)
        task = _TASKS[kind](built, model)
        return CheckedTask(task, model.title, setting, on_shapes=True)
    return CheckedTask(_given_task(built, model.title), model.title, setting)


def _given_task(built: Any, title: str) -> Task:
    if is_task(built):
        task: Task = built
        return task
    if is_lightning(built):
        return from_lightning(built)
    if isinstance(built, tuple) and len(built) == 3 and isinstance(built[0], nn.Module):
        return from_example(*built)
    missing = missing_methods(built)
    if len(missing) < len(METHODS):
        raise ContractError(
            f"{title} returned {describe(built)}, a task without {alternatives(missing, 'and')}.",
            f"A task has {alternatives(METHODS.values(), 'and')}.",
        )
    raise PlannerError(
        f"{title} returned {describe(built)}: a factory returns a torch.nn.Module or a task.",
        "Return the module itself, an object with module(), batch(size, device) and "
        "loss(module, batch), or the tuple (module, batch, loss).",
    )


def _tensor_shapes(batch: Any) -> list[torch.Size]:
    """The shapes of the tensors in a batch."""
    return [tensor.shape for tensor in all_tensors(batch)]


class CheckedTask:
    """A task with checks of what a user may get wrong, and with batches on their device, as the
    setting trains them.

    `on_shapes` says that its batches may be made of fake tensors. A user's code may read values.
    """

    def __init__(
        self, task: Task, title: str, setting: TrainSetting, on_shapes: bool = False
    ) -> None:
        self.task, self.title, self.setting, self.on_shapes = task, title, setting, on_shapes
        self.unit: str = str(getattr(task, "unit", "items"))
        self.unit = self.unit if re.fullmatch(UNIT, self.unit) else "items"
        # Whether it is known that another size makes another batch. The planner's own tasks do so.
        self._is_sized = on_shapes
        if setting.loss not in ("library", "cross-entropy"):
            raise UnsupportedError(
                f"the loss of {title} is its own, and not {setting.loss}.",
                "Omit loss, and change it in the task.",
            )
        if hasattr(task, "optimizer"):
            chosen = setting.optimizer not in ("adamw", OWN_OPTIMIZER)  # adamw is the default
            is_offloaded = setting.offload_optimizer != "none"
            whole = "which is one for all weights: it cannot step weight by weight in backward"
            for is_conflict, option, law in (
                (chosen, "--optimizer", f"and not {setting.optimizer}"),
                (setting.optimizer_in_backward, "optimizer_in_backward", whole),
                (is_offloaded, "offload_optimizer", "which is on the device"),
            ):
                if is_conflict:
                    raise UnsupportedError(
                        f"{title} makes its own optimizer, {law}.",
                        f"Omit {option}, or take optimizer() out of the task.",
                    )
            self.optimizer = self._own_optimizer
        if hasattr(task, "blocks"):
            self.blocks = self._own_blocks

    def module(self) -> nn.Module:
        with self._guard("module", "module()"):
            module = self.task.module()
        if not isinstance(module, nn.Module):
            raise PlannerError(
                f"module() of {self.title} returned {describe(module)}, not a torch.nn.Module.",
                "Return the module to train.",
            )
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ContractError(
                f"module() of {self.title} returned {describe(module)} with no trained parameter.",
                "Leave requires_grad on for those that are to be trained.",
            )
        return module

    def batch(self, size: int, device: torch.device) -> Any:
        """A batch of `size` items. Raises ContractError if batches of all sizes are the same."""
        batch = self._batch(size, device)
        if not self._is_sized:
            if not _tensor_shapes(batch):
                raise ContractError(
                    f"batch(size, device) of {self.title} returned {describe(batch)}, and no "
                    "tensor is in it.",
                    "Return tensors, in any nesting of tuples, lists and dicts.",
                )
            with torch.random.fork_rng(devices=[]):
                other_batch = self._batch(3 if size == 2 else 2, torch.device("cpu"))
            if _tensor_shapes(batch) == _tensor_shapes(other_batch):
                raise ContractError(
                    f"batch(size, device) of {self.title} makes tensors of the same shapes for "
                    "every size.",
                    "Make `size` items: every figure is for so many.",
                )
            self._is_sized = True
        return prepare_batch(batch, self.setting, device)

    def loss(self, module: Any, batch: Any) -> Tensor:
        # A module that is wrapped or compiled may lack attributes: that is no fault of the user.
        setting = self.setting
        is_wrapped = {setting.parallelism, setting.checkpointing} != {"none"} or setting.compiles
        guard = self._guard("loss", METHODS["loss"], False)
        with nullcontext() if is_wrapped or self.on_shapes else guard:
            return check_loss(self.task.loss(module, batch), self.title)

    def _batch(self, size: int, device: torch.device) -> Any:
        with self._guard("batch", f"batch({size}, {device})"):
            return self.task.batch(size, device)

    def _own_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        task: Any = self.task
        with self._guard("optimizer", f"optimizer(a list of {len(parameters)} parameters)"):
            optimizer = task.optimizer(parameters)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ContractError(
                f"optimizer(parameters) of {self.title} returned {describe(optimizer)}, not one "
                "torch.optim.Optimizer.",
                "Return the one that trains the parameters, or take optimizer() out of the task.",
            )
        trained = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        if trained.isdisjoint(map(id, parameters)):
            raise ContractError(
                f"optimizer(parameters) of {self.title} returned one that trains none of them.",
                "Make it from the parameters that it is given: module() may run more than once.",
            )
        return optimizer

    def _own_blocks(self, module: nn.Module) -> list[nn.Module]:
        task: Any = self.task
        with self._guard("blocks", f"blocks(a {type(module).__name__})"):
            blocks = list(task.blocks(module))
        modules = set(module.modules())
        if strangers := [block for block in blocks if block not in modules]:
            raise ContractError(
                f"blocks(module) returned {len(strangers)} modules that are not in the module, of "
                f"class {type(strangers[0]).__name__}.",
                "Return parts of the module that it is given.",
            )
        return blocks

    def _guard(self, name: str, call: str, always: bool = True) -> AbstractContextManager[None]:
        return guard_call(f"{name}() of {self.title}", getattr(self.task, name), call, always)
