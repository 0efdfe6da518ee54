"""What an error that ended a probe says of its setting."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

import torch

from planner.errors import PlannerError
from planner.schema import ProbeStatus
from search.probe.failure import is_allocation_failure


class NonFiniteError(Exception):
    """The loss, or a weight after the steps, is not a number or infinite."""


def classify(error: BaseException) -> tuple[ProbeStatus, str]:
    """The status and the words of a failure.

    Out of memory is what any error in the chain says it is: compilers wrap it. A model that a
    compiler cannot compile is an unsupported setting, not a crash: the same setting without
    compilation may well run.
    """
    chain = list(causes(error))
    for link in chain:
        if isinstance(link, NonFiniteError):
            return "non_finite", str(link)
        if isinstance(link, torch.OutOfMemoryError | MemoryError):
            return "out_of_memory", _first_line(link) or type(link).__name__
        if isinstance(link, RuntimeError) and is_allocation_failure(str(link)):
            return "out_of_memory", _first_line(link)
    for link in chain:
        if isinstance(link, PlannerError):
            return "unsupported", str(link)
        if is_compile_failure(link):
            return "unsupported", f"torch.compile failed: {type(link).__name__}: {link}".strip()
    frames = traceback.extract_tb(error.__traceback__)
    where = [frame for frame in frames if not frame.filename.startswith("<")]
    place = f" ({where[-1].filename}:{where[-1].lineno})" if where else ""
    return "crashed", f"{type(error).__name__}: {error}{place}"


def causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def is_compile_failure(error: BaseException) -> bool:
    """Raised by the compiler: by Dynamo, by AOTAutograd's backends or by Inductor."""
    module = type(error).__module__
    return module.startswith(("torch._dynamo.", "torch._inductor.", "torch._functorch."))


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
