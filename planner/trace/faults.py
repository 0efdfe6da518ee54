"""What stops a trace, in words: the reason, the line of code, and the way out."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

import planner
from planner.core.errors import PlannerError, UnsupportedError
from planner.core.schema import Model
from planner.core.schema.any_model import FactoryModel
from planner.training.tasks.trees import outline

# Frames in these are not what a person would mend.
_OTHERS = tuple(str(Path(package.__file__ or "").parent) + "/" for package in (torch, planner))
_PROBED = "'planner tune' can still measure it: it runs the model for real, without a prior."
_AS_ARRAY = ("numpy() is not supported", "Cannot access data pointer")


class BrokenTraceError(RuntimeError):
    """The step broke on fake tensors: `operation` (an aten overload) raised `__cause__`, or Python
    code did where it is empty. `batch` is what a user's task had made, None where it makes none."""

    def __init__(self, operation: str, batch: Any = None) -> None:
        super().__init__(f"{operation or 'the training step'} broke on fake tensors")
        self.operation = operation
        self.batch = "" if batch is None else outline(batch)


def data_read(how: str, where: str | None = None) -> UnsupportedError:
    """The model reads values of a tensor, which depend on data. `where` None is here and now."""
    where = where or place_now()
    return UnsupportedError(
        f"the model reads a tensor's value ({how}) at {where}, and that value depends on data: a "
        "trace has only shapes.",
        _way_out("Compute it from shapes or Python numbers, if you can.", where),
    )


def _way_out(mended: str, where: str) -> str:
    """`mended` says how a person would mend code of their own, which a library's is not."""
    if any(folder in where for folder in ("site-packages", "dist-packages")):
        mended = "That is a library's code: a task with a loss of your own may go round it."
    return f"{mended} {_PROBED}"


def trace_error(model: Model, broken: BrokenTraceError) -> PlannerError:
    """What a person is told of a trace that broke."""
    cause = broken.__cause__
    where = place(traceback.extract_tb(cause.__traceback__ if cause is not None else None))
    said = str(cause).strip().partition("\n")[0]
    operation = ".".join(broken.operation.split(".")[:2])
    if isinstance(cause, DynamicOutputShapeException | DataDependentOutputException):
        return UnsupportedError(
            f"{model.title} cannot be traced: {operation} at {where} makes a tensor whose size "
            "depends on data, and a trace has only shapes.",
            _way_out("Use a mask or torch.where instead, if you can.", where),
        )
    if any(text in said for text in _AS_ARRAY):
        return data_read(".numpy()", where)
    if isinstance(cause, UnsupportedOperatorException | NotImplementedError) and operation:
        return PlannerError(
            f"{model.title} cannot be traced: {operation} at {where} has no fake kernel: {said}",
            f"Give it one (torch.library.register_fake). {_PROBED}",
        )
    during = f" in {operation}" if operation else ""
    return PlannerError(
        f"{model.title} cannot be traced: its step raised {type(cause).__name__}{during} at "
        f"{where}{f': {said}' if said else '.'}",
        f"{_given(model, broken.batch)}If real tensors work there, it is a fault of the trace. "
        f"{_PROBED}",
    )


def _given(model: Model, batch: str) -> str:
    """The batch that the step had: a task's own, or what a module gets unless it is told another,
    and how it is given another."""
    if batch:
        return f"The task's batch was {batch}. "
    task = (
        "If the model takes another input than this step gives it, or returns something else, let "
        "its factory return a task: the module, its batch and its loss. "
    )
    if not isinstance(model, FactoryModel):
        return task
    height, width = model.image_size
    return (
        f"A module is given images of {height}x{width} px and {model.num_classes} classes: "
        f"--image-size and --num-classes say others. {task}"
    )


def place(frames: Iterable[traceback.FrameSummary]) -> str:
    """`file:line` of the innermost frame outside torch and this package."""
    outside = [f for f in frames if not f.filename.startswith((*_OTHERS, "<"))]
    return f"{outside[-1].filename}:{outside[-1].lineno}" if outside else "the training step"


def place_now() -> str:
    """Where the code that runs now was called."""
    return place(traceback.extract_stack())


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """torch logs the whole stack when an operation refuses fake tensors; we say it in our words."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
