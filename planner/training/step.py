"""The step of `train.py` as a probe and a recording run it: on one batch, with a callback for each
phase.

The step on shapes (`planner.step.training`) mirrors `train.Step` line by line. This file needs
torch, and only code that runs a real module imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import repeat
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from planner.core.errors import ContractError
from planner.core.schema import TrainSetting
from planner.core.schema.record import Phase
from planner.training.levers import offload_activations
from planner.training.tasks.contract import Task, all_tensors
from planner.training.train import Setting, Step
from planner.training.zero import ZeroEngine

# Called with the phase that has just ended: "forward", "backward", "optimizer" or "zero_grad".
OnPhase = Callable[[Phase], None]


def ignore_phase(phase: Phase) -> None:
    """The callback where nobody needs the phases."""


class Training(Step):
    """`train.Step` over one batch that is used again and again, with checks of a person's task.

    Its `setting` is the script's, made from `train_setting`. `engine` is DeepSpeed's, if it takes
    the place of the optimizer and the scaler.
    """

    def __init__(
        self, model: nn.Module, script_setting: Setting, task: Task, optimizers: list[Optimizer],
        parallel_model: Any, compiled_model: Any, setting: TrainSetting,
        engine: ZeroEngine | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            model, script_setting, task.loss, optimizers, parallel_model, compiled_model
        )
        self.task, self.train_setting, self.engine = task, setting, engine
        if engine is not None:
            self.scaler = engine.scaler
        self.on_phase: OnPhase = ignore_phase
        self.batch: Any = None

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of all weights, unless each weight has its own."""
        (optimizer,) = self.optimizers
        return optimizer

    def step(self, on_phase: OnPhase = ignore_phase) -> None:
        """One optimizer step; `on_phase` is called at the end of each phase.

        `forward` and `backward` end once per micro-batch. At the end of `forward` the logits are
        released and the loss is alive; at the end of `optimizer` the gradients are still alive.
        With `optimizer_in_backward` the gradients are gone by the end of `backward`, and the two
        phases after it only update the average of the weights, if there is one.
        """
        self.on_phase = on_phase
        self(repeat(self.batch))
        self.on_phase = ignore_phase

    def micro_step(self, batch: Any) -> None:
        with refuse_other_optimizers(self.optimizers):
            super().micro_step(batch)
        self.on_phase("backward")

    def forward(self, batch: Any) -> Tensor:
        loss = super().forward(batch)
        self.check_loss_value(loss)
        self.on_phase("forward")
        return loss

    def check_loss_value(self, loss: Tensor) -> None:
        """A check of each loss, for subclasses."""

    def offload_context(self, batch: Any) -> AbstractContextManager[object]:
        """The context for a batch of any nesting. On the CPU nothing moves, so that memory and time
        are those without offloading: such a step only shows that it runs."""
        if self.setting.offload == "none":
            return super().offload_context(batch)
        weights = (*self.model.parameters(), *self.model.buffers())
        return offload_activations((*weights, *all_tensors(batch)))

    def backward(self, loss: Tensor) -> None:
        if self.engine is not None:
            self.engine.backward(loss)
        else:
            super().backward(loss)

    def update(self) -> None:
        self._refuse_untrained()
        if self.engine is not None:
            self.engine.step()
            self.update_average()
        else:
            super().update()
        self.on_phase("optimizer")

    def zero_grad(self) -> None:
        if self.engine is None:
            super().zero_grad()
        self.on_phase("zero_grad")

    def _refuse_untrained(self) -> None:
        may_be_gone = self.train_setting.updates_beside or self.engine is not None
        if not may_be_gone and all(p.grad is None for p in self.parameters):
            raise ContractError(
                "the loss depends on no trained parameter of the module that module() returned.",
                "Compute it with the module that is given to loss(module, batch).",
            )


@contextmanager
def refuse_other_optimizers(optimizers: list[Optimizer]) -> Iterator[None]:
    """A context in which no optimizer but `optimizers` may step, since nobody would count its
    state. Raises ContractError where another one does, as in the loss of a GAN.
    """

    def refuse(optimizer: Optimizer, *_: Any) -> None:
        if not any(optimizer is allowed for allowed in optimizers):
            raise ContractError(
                f"the step has an optimizer of its own ({type(optimizer).__name__}), which steps "
                "while the loss is computed, beside the one that trains the module.",
                "Write a task for each network, the others frozen; 'planner emulate' says what "
                "your own script takes as it is, with all its optimizers.",
            )

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
