"""The contract of a task: batches as trees, its methods, and the errors of those that break it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import planner
from planner.core.errors import ContractError, PlannerError
from planner.core.schema import TrainSetting

# Batches as trees: tensors in any nesting of tuples, lists, dicts, mappings and dataclasses.


def map_tensors(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """The tree with each of its tensors changed. All other values stay as they are."""
    if isinstance(tree, Tensor):
        return change(tree)
    return rebuild(tree, lambda inner: map_tensors(inner, change))


def rebuild(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The container with each of its values changed."""
    if isinstance(tree, tuple):
        values = [change(value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    if isinstance(tree, list):
        return [change(value) for value in tree]
    if isinstance(tree, Mapping):
        changed = {key: change(value) for key, value in tree.items()}
        if type(tree) is dict:
            return changed
        copied: Any = copy.copy(tree)  # transformers' collators return a class of their own
        for key, value in changed.items():
            copied[key] = value
        return copied
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree) if f.init}
        return dataclasses.replace(tree, **{name: change(value) for name, value in fields.items()})
    return tree


def tree_values(tree: Any) -> list[Any]:
    """The values of a container, in order; none if `tree` is no container."""
    values: list[Any] = []

    def collect(value: Any) -> Any:
        values.append(value)
        return value

    if not isinstance(tree, Tensor):
        rebuild(tree, collect)
    return values


def all_tensors(tree: Any) -> Iterator[Tensor]:
    """Every tensor of `tree`, in order."""
    if isinstance(tree, Tensor):
        yield tree
    for inner in tree_values(tree):
        yield from all_tensors(inner)


MAX_SHOWN = 4  # values of one container in a description


def describe_shapes(tree: Any) -> str:
    """A batch by its shapes: `([2, 3, 8, 8] float32, {'label': [2] int64})`."""
    if isinstance(tree, Tensor):
        return f"{list(tree.shape)} {str(tree.dtype).removeprefix('torch.')}"
    if isinstance(tree, Mapping):
        shown = [f"{key!r}: {describe_shapes(value)}" for key, value in tree.items()]
        return f"{{{_first_values(shown)}}}"
    if isinstance(tree, tuple | list):
        values = _first_values(list(map(describe_shapes, tree)))
        return f"({values})" if isinstance(tree, tuple) else f"[{values}]"
    return type(tree).__name__


def _first_values(texts: list[str]) -> str:
    num_hidden = len(texts) - MAX_SHOWN
    return ", ".join([*texts[:MAX_SHOWN], *([f"and {num_hidden} more"] if num_hidden > 0 else [])])


def prepare_batch(batch: Any, setting: TrainSetting, device: torch.device) -> Any:
    """A batch on its device as the setting trains it: floats in pure bf16, images channels last."""

    def prepare_tensor(tensor: Tensor) -> Tensor:
        tensor = tensor.to(device)
        if setting.precision == "pure-bf16" and tensor.is_floating_point():
            tensor = tensor.to(torch.bfloat16)
        return in_memory_format(tensor, setting)

    return map_tensors(batch, prepare_tensor)


def in_memory_format(tensor: Tensor, setting: TrainSetting) -> Tensor:
    """A float tensor of images [B, C, H, W] or clips [B, C, T, H, W] as the setting lays it out."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if setting.memory_format != "channels_last" or tensor.dim() not in formats:
        return tensor
    if not tensor.is_floating_point():
        return tensor
    return tensor.contiguous(memory_format=formats[tensor.dim()])


METHODS = {"module": "module()", "batch": "batch(size, device)", "loss": "loss(module, batch)"}

WRITE_A_TASK = (
    "If your step is not images -> logits, return a task from the factory: an object with "
    "module(), batch(size, device) and loss(module, batch), or planner.training.tasks.from_example("
    "module, batch, loss)."
)


class Task(Protocol):
    """A task: what one step trains. Any object with these methods is one, without a base class.

    It may have more: `unit`, the name of one item of the batch ("clips"); `optimizer(parameters)`,
    which makes the optimizer instead of the setting; `blocks(module)`, the modules that
    checkpointing may wrap.

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
        """The module to train."""

    def batch(self, size: int, device: torch.device) -> Any:
        """`size` items on `device`: tensors in any nesting of tuples, lists and dicts."""

    def loss(self, module: Any, batch: Any) -> Tensor:
        """The loss of one batch, a scalar. Runs inside autocast; `module` may be compiled."""


def is_task(value: object) -> bool:
    """Whether `value` has a task's three methods and is no module, which may have a `loss` too."""
    return not missing_methods(value) and not isinstance(value, nn.Module | type)


def missing_methods(value: object) -> list[str]:
    """The methods of a task that `value` lacks, with their arguments."""
    return [call for name, call in METHODS.items() if not callable(getattr(value, name, None))]


@contextlib.contextmanager
def guard_call(
    caller: str, method: Callable[..., Any], call: str, always: bool = True
) -> Iterator[None]:
    """A context for a call of a user's `method`. Raises ContractError with the user's line for any
    error in it; the error is its cause, so that an out-of-memory is still found. Without `always`,
    errors that another setting or batch may avoid are raised as they are."""
    try:
        yield
    except Exception as error:
        if isinstance(error, PlannerError) or not (always or _is_mistake(error)):
            raise
        text = " ".join(str(error).split())
        place = _user_line(error, method)
        raise ContractError(
            f"{caller} raised {type(error).__name__}{place}{f': {text}' if text else '.'}",
            f"It was called as {call}: mend it there.",
        ) from error


def _is_mistake(error: Exception) -> bool:
    """Whether code that raises this fails with every setting: a wrong name, or a method that does
    not accept the arguments of our call."""
    is_wrong = isinstance(error, AttributeError | ImportError | NameError)
    last = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return is_wrong or (isinstance(error, TypeError) and last.parent == Path(__file__).parent)


def _user_line(error: Exception, method: Callable[..., Any]) -> str:
    """The innermost line of the user's code; if none had run, the first line of the method."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(Path(f.filename))]
    if frames:
        return f" at {frames[-1].filename}:{frames[-1].lineno}"
    code = getattr(method, "__code__", None)
    return f" at {code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def _is_users(file: Path) -> bool:
    """Whether a file is the user's: neither of a library nor of this package."""
    our_folders = (Path(planner.__file__).parent, Path(sysconfig.get_path("stdlib")))
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(file.parts)
    return not is_installed and file.is_file() and not any(map(file.is_relative_to, our_folders))


def describe(value: object) -> str:
    """A returned value in few words: a tensor by its shape, anything else by its type."""
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
    """Return `loss` if it is a scalar that can go backward. Raises ContractError."""
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
