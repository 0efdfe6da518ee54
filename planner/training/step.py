"""The step of `train.py` as a probe and a recording run it: on one batch, with its phases heard.

The step on shapes (`planner.step.training`) is the mirror of `train.Step`, line by line. Needs
torch: imported only by what runs a real module.
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
from planner.training.levers import offload_activations
from planner.training.tasks.contract import Task, tensors_of
from planner.training.train import Setting, Step
from planner.training.zero import ZeroEngine

# "forward", "backward", "optimizer" or "zero_grad": the phase that has just ended
OnPhase = Callable[[str], None]


def ignore(phase: str) -> None:
    """Nobody listens."""


class Training(Step):
    """`train.Step` over a batch that stays, with what a person's task may get wrong looked at.

    `asked` is the setting as a person has it, `engine` DeepSpeed's in the place of optimizer and
    scaler where one trains.
    """

    def __init__(
        self, model: nn.Module, setting: Setting, task: Task, optimizers: list[Optimizer],
        spread: Any, call: Any, asked: TrainSetting, engine: ZeroEngine | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, setting, task.loss, optimizers, spread, call)
        self.task, self.asked, self.engine = task, asked, engine
        if engine is not None:
            self.scaler = engine.scaler
        self.on_phase: OnPhase = ignore
        self.batch: Any = None

    @property
    def optimizer(self) -> Optimizer:
        """The one of all weights, where each weight has none of its own."""
        (optimizer,) = self.optimizers
        return optimizer

    def step(self, on_phase: OnPhase = ignore) -> None:
        """One optimizer step; `on_phase` hears each phase end.

        `forward` and `backward` end once per micro-batch. At the end of `forward` the logits are
        released and the loss is alive; at the end of `optimizer` the gradients still are. With
        `optimizer_in_backward` these are gone by the end of `backward`, and the two phases after it
        hold only the average of the weights, where there is one.
        """
        self.on_phase = on_phase
        self(repeat(self.batch))
        self.on_phase = ignore

    def micro_step(self, batch: Any) -> None:
        with one_optimizer(self.optimizers):
            super().micro_step(batch)
        self.on_phase("backward")

    def forward(self, batch: Any) -> Tensor:
        loss = super().forward(batch)
        self.look_at(loss)
        self.on_phase("forward")
        return loss

    def look_at(self, loss: Tensor) -> None:
        """What is looked at of each loss: nothing, here."""

    def offloading(self, batch: Any) -> AbstractContextManager[object]:
        """Of any nesting of a task's. A step on the CPU has all of it there already: nothing moves,
        and its memory and time are those without. That it runs is all that this shows."""
        if self.setting.offload == "none":
            return super().offloading(batch)
        weights = (*self.model.parameters(), *self.model.buffers())
        return offload_activations((*weights, *tensors_of(batch)))

    def backward(self, loss: Tensor) -> None:
        if self.engine is not None:
            self.engine.backward(loss)
        else:
            super().backward(loss)

    def update(self) -> None:
        self._refuse_untrained()
        if self.engine is not None:
            self.engine.step()
            self.follow()
        else:
            super().update()
        self.on_phase("optimizer")

    def zero_grad(self) -> None:
        if self.engine is None:
            super().zero_grad()
        self.on_phase("zero_grad")

    def _refuse_untrained(self) -> None:
        gone = self.asked.updates_beside or self.engine is not None
        if not gone and all(p.grad is None for p in self.parameters):
            raise ContractError(
                "the loss depends on no trained parameter of the module that module() returned.",
                "Compute it with the module that is given to loss(module, batch).",
            )


@contextmanager
def one_optimizer(ours: list[Optimizer]) -> Iterator[None]:
    """Within, no other optimizer steps: its state would be counted by nobody.

    Raises ContractError where one does, as in the loss of a GAN.
    """

    def refuse(optimizer: Optimizer, *_: Any) -> None:
        if not any(optimizer is known for known in ours):
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
