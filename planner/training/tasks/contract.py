"""The contract of a task, and what is said of a step that does not keep it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from planner.core.errors import ContractError

WRITE_A_TASK = (
    "If your step is not images -> logits, return a task from the factory: an object with "
    "module(), batch(size, device) and loss(module, batch), or planner.training.tasks.from_example("
    "module, batch, loss)."
)


class Task(Protocol):
    """What one step trains. Any object with these methods is one; no base class is needed.

    It may have more: `unit`, what one item of the batch is called ("clips");
    `optimizer(parameters)`, which makes the optimizer in place of the setting's; `blocks(module)`,
    the modules that checkpointing may wrap.

        class Tagging:
            unit = "sequences"

            def module(self):
                return Tagger()

            def batch(self, size, device):
                return torch.randint(1000, (size, 128), device=device)

            def loss(self, module, batch):
                return module(batch).mean()
    """

    def module(self) -> nn.Module:
        """The module to train, made when it is first asked for."""

    def batch(self, size: int, device: torch.device) -> Any:
        """`size` items on `device`: tensors in any nesting of tuples, lists and dicts."""

    def loss(self, module: Any, batch: Any) -> Tensor:
        """The loss of one batch, a scalar. Runs inside autocast; `module` may be compiled."""


def is_task(value: object) -> bool:
    """Whether `value` has a task's three methods (a module may have a `loss` of its own)."""
    methods = ("module", "batch", "loss")
    is_one = all(callable(getattr(value, name, None)) for name in methods)
    return is_one and not isinstance(value, nn.Module | type)


def describe(value: object) -> str:
    """What came back, in few words: a tensor by its shape, anything else by its type."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, dict):
        return f"a {type(value).__name__} with {', '.join(map(repr, list(value)[:6]))}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    if value is None:
        return "None"
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def check_loss(loss: object, whose: str) -> Tensor:
    """`loss` itself, where it is a scalar that can go backward. Raises ContractError."""
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise ContractError(
            f"the loss of {whose} is {describe(loss)}, not a scalar tensor.",
            "Return one number as a tensor from loss(module, batch), as cross_entropy does.",
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ContractError(
            f"the loss of {whose} does not depend on any parameter that is trained.",
            "Compute it from what the module returns, without detach() and torch.no_grad().",
        )
    return loss
