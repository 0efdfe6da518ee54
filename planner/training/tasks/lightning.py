"""A LightningModule as a task: its `training_step` is the step. Imports no Lightning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from planner.core.errors import PlannerError, UnsupportedError
from planner.training.tasks.contract import describe
from planner.training.tasks.example import ExampleTask, count_items

NO_BATCH = "Return planner.training.tasks.from_lightning(module, batch) with one real batch."


def is_lightning(value: object) -> bool:
    """Whether `value` is a LightningModule, of `lightning` or of `pytorch_lightning`."""
    return any(kind.__name__ == "LightningModule" for kind in type(value).__mro__)


def from_lightning(module: Any, batch: Any = None, batch_size: int | None = None) -> LightningTask:
    """A task from a LightningModule and one real batch; without one, `train_dataloader()` makes it.

        def build():
            return planner.training.tasks.from_lightning(Segmenter(), next(iter(loader)))

    A factory may return the LightningModule itself where it has a `train_dataloader`. The loss is
    what `training_step(batch, 0)` returns, the optimizer what `configure_optimizers` does.
    Raises UnsupportedError for manual optimization, and PlannerError where there is no batch.
    """
    if not module.automatic_optimization:
        raise UnsupportedError(
            f"{type(module).__name__} optimizes by itself (automatic_optimization is False), and "
            "its step is then no loss.",
            "Write a task whose loss(module, batch) returns the loss of one step.",
        )
    if batch is None:
        batch = _first_batch(module)
    return LightningTask(module, batch, count_items(batch, batch_size))


class LightningTask(ExampleTask):
    """`from_lightning`'s."""

    def __init__(self, module: Any, batch: Any, num_items: int) -> None:
        super().__init__(module, batch, _step, num_items)

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The one that `configure_optimizers` makes; its schedule is left out."""
        module: Any = self.module()
        found = module.configure_optimizers()
        if isinstance(found, Mapping):
            found = found["optimizer"]
        if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], list | tuple):
            found = found[0]
        if isinstance(found, list | tuple) and len(found) == 1:
            found = found[0]
        if isinstance(found, Mapping):
            found = found["optimizer"]
        if not isinstance(found, torch.optim.Optimizer):
            raise UnsupportedError(
                f"configure_optimizers of {type(module).__name__} returned {describe(found)}, not "
                "one optimizer.",
                "Write a task with the one optimizer that trains the module.",
            )
        return found


def _step(module: Any, batch: Any) -> Tensor:
    if hasattr(module, "_orig_mod"):  # what torch.compile returns
        raise UnsupportedError(
            "a LightningModule is not compiled in a probe: its training_step would call the module "
            "as it was.",
            "Choose --compile off, or write a task whose loss calls the module that it is given.",
        )
    found = module.training_step(batch, 0)
    return found["loss"] if isinstance(found, Mapping) else found  # type: ignore[no-any-return]


def _first_batch(module: Any) -> Any:
    try:
        loader = module.train_dataloader()
    except Exception as error:  # Lightning's own, where a module has none
        raise PlannerError(
            f"{type(module).__name__} has no train_dataloader to take a batch from "
            f"({type(error).__name__}).",
            NO_BATCH,
        ) from error
    return next(iter(loader))
