"""From a model, or from what a user's factory returned, to its task."""

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
from planner.libraries.building import build_for
from planner.libraries.transformers import form_of
from planner.training.tasks.contract import (
    METHODS,
    Task,
    calling,
    check_loss,
    describe,
    is_task,
    missing_methods,
    prepare,
    tensors_of,
)
from planner.training.tasks.example import from_example, from_lightning, is_lightning
from planner.training.tasks.vision import Classification, Detection, Segmentation

# The task of a transformers model, which computes its loss by itself: what it is given.

MASKED_SHARE = 0.6  # of the patches: SimMIM's best (arXiv 2111.09886 §4.1.2)


class OwnLoss:
    """`module(**batch).loss`: random inputs of the model's sizes, and labels of its configuration.

    Sequences are full: there is no padding, and so no attention mask.
    """

    def __init__(self, module: nn.Module, model: NamedModel) -> None:
        form = form_of(type(module))
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


_KINDS: dict[str, Callable[[nn.Module, NamedModel], Task]] = {
    "segmentation": Segmentation,
    "detection": Detection,
    "own-loss": OwnLoss,
}


def task_for(model: Model, setting: TrainSetting) -> Task:
    """The task of any model: its library's, or what the user's factory returns.

    Builds the module. Raises PlannerError where it cannot be built, and UnsupportedError for a
    setting that is the task's own matter.
    """
    return as_task(build_for(model, setting)(), model, setting)


def load_task(model: Mapping[str, Any], setting: Mapping[str, Any]) -> Task:
    """The task of a model and a setting by their fields: what an emitted file calls."""
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
        task = _KINDS[kind](built, model)
        return GivenTask(task, model.title, setting, on_shapes=True)
    return GivenTask(_given(built, model.title), model.title, setting)


def _given(built: Any, title: str) -> Task:
    if is_task(built):
        task: Task = built
        return task
    if is_lightning(built):
        return from_lightning(built)
    if isinstance(built, tuple) and len(built) == 3 and isinstance(built[0], nn.Module):
        return from_example(*built)
    lacking = missing_methods(built)
    if len(lacking) < len(METHODS):
        raise ContractError(
            f"{title} returned {describe(built)}, a task without {alternatives(lacking, 'and')}.",
            f"A task has {alternatives(METHODS.values(), 'and')}.",
        )
    raise PlannerError(
        f"{title} returned {describe(built)}: a factory returns a torch.nn.Module or a task.",
        "Return the module itself, an object with module(), batch(size, device) and "
        "loss(module, batch), or the tuple (module, batch, loss).",
    )


def _shapes(batch: Any) -> list[torch.Size]:
    """Of its tensors."""
    return [tensor.shape for tensor in tensors_of(batch)]


class GivenTask:
    """A task that was given, with its batches on their device and as the setting trains them.

    `on_shapes` says that its batches may be made of fake tensors; a user's code may read values.
    """

    def __init__(
        self, task: Task, title: str, setting: TrainSetting, on_shapes: bool = False
    ) -> None:
        self.task, self.title, self.setting, self.on_shapes = task, title, setting, on_shapes
        self.unit: str = str(getattr(task, "unit", "items"))
        self.unit = self.unit if re.fullmatch(UNIT, self.unit) else "items"
        self._is_sized = on_shapes  # whether another size was seen to make another batch; ours do
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
        with self._calling("module", "module()"):
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
        """Raises ContractError where another size makes no other batch."""
        made = self._batch(size, device)
        if not self._is_sized:
            if not _shapes(made):
                raise ContractError(
                    f"batch(size, device) of {self.title} returned {describe(made)}, and no tensor "
                    "is in it.",
                    "Return tensors, in any nesting of tuples, lists and dicts.",
                )
            with torch.random.fork_rng(devices=[]):
                other = self._batch(3 if size == 2 else 2, torch.device("cpu"))
            if _shapes(made) == _shapes(other):
                raise ContractError(
                    f"batch(size, device) of {self.title} makes tensors of the same shapes for "
                    "every size.",
                    "Make `size` items: every figure is for so many.",
                )
            self._is_sized = True
        return prepare(made, self.setting, device)

    def loss(self, module: Any, batch: Any) -> Tensor:
        at = self.setting  # what wraps or compiles the module may lack names that it has
        may_differ = {at.parallelism, at.checkpointing} != {"none"} or at.compiles or self.on_shapes
        with nullcontext() if may_differ else self._calling("loss", METHODS["loss"], False):
            return check_loss(self.task.loss(module, batch), self.title)

    def _batch(self, size: int, device: torch.device) -> Any:
        with self._calling("batch", f"batch({size}, {device})"):
            return self.task.batch(size, device)

    def _own_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        task: Any = self.task
        with self._calling("optimizer", f"optimizer(a list of {len(parameters)} parameters)"):
            made = task.optimizer(parameters)
        if not isinstance(made, torch.optim.Optimizer):
            raise ContractError(
                f"optimizer(parameters) of {self.title} returned {describe(made)}, not one "
                "torch.optim.Optimizer.",
                "Return the one that trains the parameters, or take optimizer() out of the task.",
            )
        held = {id(parameter) for group in made.param_groups for parameter in group["params"]}
        if held.isdisjoint(map(id, parameters)):
            raise ContractError(
                f"optimizer(parameters) of {self.title} returned one that trains none of them.",
                "Make it from the parameters that it is given: module() may run more than once.",
            )
        return made

    def _own_blocks(self, module: nn.Module) -> list[nn.Module]:
        task: Any = self.task
        with self._calling("blocks", f"blocks(a {type(module).__name__})"):
            blocks = list(task.blocks(module))
        own = set(module.modules())
        if strange := [block for block in blocks if block not in own]:
            raise ContractError(
                f"blocks(module) returned {len(strange)} modules that are not in the module, of "
                f"class {type(strange[0]).__name__}.",
                "Return parts of the module that it is given.",
            )
        return blocks

    def _calling(self, name: str, given: str, always: bool = True) -> AbstractContextManager[None]:
        return calling(f"{name}() of {self.title}", getattr(self.task, name), given, always)
