"""The contract of a task, and what is said of a step that does not keep it."""

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
    """The same tree with each tensor changed; what is no tensor and holds none stays as it is."""
    if isinstance(tree, Tensor):
        return change(tree)
    return rebuild(tree, lambda inner: map_tensors(inner, change))


def rebuild(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The same container with each of its values changed."""
    if isinstance(tree, tuple):
        values = [change(value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    if isinstance(tree, list):
        return [change(value) for value in tree]
    if isinstance(tree, Mapping):
        changed = {key: change(value) for key, value in tree.items()}
        if type(tree) is dict:
            return changed
        same: Any = copy.copy(tree)  # what transformers' collators return is a class of its own
        for key, value in changed.items():
            same[key] = value
        return same
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree) if f.init}
        return dataclasses.replace(tree, **{name: change(value) for name, value in fields.items()})
    return tree


def children(tree: Any) -> list[Any]:
    """The values of a container, in order; of anything else none."""
    found: list[Any] = []

    def note(value: Any) -> Any:
        found.append(value)
        return value

    if not isinstance(tree, Tensor):
        rebuild(tree, note)
    return found


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """Every tensor of `tree`, in order."""
    if isinstance(tree, Tensor):
        yield tree
    for inner in children(tree):
        yield from tensors_of(inner)


MAX_SHOWN = 4  # values of one container


def outline(tree: Any) -> str:
    """A batch by its shapes: `([2, 3, 8, 8] float32, {'label': [2] int64})`."""
    if isinstance(tree, Tensor):
        return f"{list(tree.shape)} {str(tree.dtype).removeprefix('torch.')}"
    if isinstance(tree, Mapping):
        shown = [f"{key!r}: {outline(value)}" for key, value in tree.items()]
        return f"{{{_some(shown)}}}"
    if isinstance(tree, tuple | list):
        values = _some(list(map(outline, tree)))
        return f"({values})" if isinstance(tree, tuple) else f"[{values}]"
    return type(tree).__name__


def _some(shown: list[str]) -> str:
    more = len(shown) - MAX_SHOWN
    return ", ".join([*shown[:MAX_SHOWN], *([f"and {more} more"] if more > 0 else [])])


def prepare(batch: Any, setting: TrainSetting, device: torch.device) -> Any:
    """A batch on its device as the setting trains it: floats in pure bf16, images channels last."""

    def prepared(tensor: Tensor) -> Tensor:
        tensor = tensor.to(device)
        if setting.precision == "pure-bf16" and tensor.is_floating_point():
            tensor = tensor.to(torch.bfloat16)
        return in_memory_format(tensor, setting)

    return map_tensors(batch, prepared)


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
    return not missing_methods(value) and not isinstance(value, nn.Module | type)


def missing_methods(value: object) -> list[str]:
    """Those of a task that `value` lacks, as they are called."""
    return [call for name, call in METHODS.items() if not callable(getattr(value, name, None))]


@contextlib.contextmanager
def calling(
    what: str, method: Callable[..., Any], given: str, always: bool = True
) -> Iterator[None]:
    """Around a call of a user's `method`. Raises ContractError for what it raises, with its line;
    that memory ran out is the cause of that error, where it did. Not `always`: what another setting
    or batch may mend is raised as it is."""
    try:
        yield
    except Exception as error:
        if isinstance(error, PlannerError) or not (always or _is_mistake(error)):
            raise
        said = " ".join(str(error).split())
        where = _line_of(error, method)
        raise ContractError(
            f"{what} raised {type(error).__name__}{where}{f': {said}' if said else '.'}",
            f"It was called as {given}: mend it there.",
        ) from error


def _is_mistake(error: Exception) -> bool:
    """Whether no setting runs code that raises this: a wrong name, or a call that we made and that
    does not take what it is given."""
    wrong = isinstance(error, AttributeError | ImportError | NameError)
    last = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return wrong or (isinstance(error, TypeError) and last.parent == Path(__file__).parent)


def _line_of(error: Exception, method: Callable[..., Any]) -> str:
    """The innermost line that is the user's; where it never came to one, the method's first."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_own(Path(f.filename))]
    if frames:
        return f" at {frames[-1].filename}:{frames[-1].lineno}"
    code = getattr(method, "__code__", None)
    return f" at {code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def _is_own(file: Path) -> bool:
    """Whether a frame is of no library, nor of ours."""
    others = (Path(planner.__file__).parent, Path(sysconfig.get_path("stdlib")))
    installed = not {"site-packages", "dist-packages"}.isdisjoint(file.parts)
    return not installed and file.is_file() and not any(map(file.is_relative_to, others))


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
