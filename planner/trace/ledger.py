"""The ledger of a real module, traced: judged exactly as one of a step on shapes."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from types import TracebackType

import torch

from planner.errors import PlannerError, UnsupportedError
from planner.ledger import Allocated, Event, Freed, Ledger, Marked, Tagged
from planner.libraries.building import build_for
from planner.schema import Model, SwinConfig, TrainSetting
from planner.trace.run import BrokenTraceError, Build, trace_training


def trace_estimate(model: Model, setting: TrainSetting, build: Build | None = None) -> Ledger:
    """Two optimizer steps of the real module on fake tensors, with gradients summed as eager does.

    `build` makes the module; without it, the library of a `SwinConfig` or the factory that a
    `FactoryModel` names. Raises UnsupportedError for what a trace does not follow, and
    PlannerError naming the operation where the module cannot run on shapes alone.
    """
    _check(model, setting)
    build = build or build_for(model, setting)
    if setting.compile != "off":
        from planner.trace.compiled import trace_compiled

        return trace_compiled(model, setting, build)
    try:
        trace = trace_training(build, model, setting, gradient_sums="in_place", detailed=True)
    except PlannerError:
        raise
    except BrokenTraceError as broken:
        raise _error(model, broken) from broken.__cause__
    notes = (
        f"traced on fake tensors with torch {torch.__version__}",
        "scratch that CUDA kernels take for themselves is not in the trace",
    )
    events = tuple(_short_names(_tag_activations(trace.events)))
    return Ledger(events, setting.batch_size, trace.num_parameters, notes)


def _check(model: Model, setting: TrainSetting) -> None:
    faults = []
    if setting.parallelism != "none":
        faults.append(f"--trace follows one device, not parallelism {setting.parallelism!r}.")
    if not isinstance(model, SwinConfig) and setting.checkpointing != "none":
        faults.append(
            f"checkpointing {setting.checkpointing!r} is a matter of the model {model.title}."
        )
    if not isinstance(model, SwinConfig) and (setting.frozen_stages or setting.lora_rank):
        faults.append(f"what is trained is a matter of the model {model.title}.")
    if faults:
        raise UnsupportedError(
            "\n".join(faults),
            "Leave these options out; checkpoint and freeze inside a factory of your own.",
        )


def _error(model: Model, broken: BrokenTraceError) -> PlannerError:
    cause = broken.__cause__
    said = str(cause).strip().partition("\n")[0] or type(cause).__name__
    where = place(cause.__traceback__ if cause is not None else None)
    what = f"{broken.operation} broke" if broken.operation else type(cause).__name__
    return PlannerError(
        f"{model.title} cannot be traced: {what} on fake tensors in {where}: {said}",
        "Give the operation a fake kernel (torch.library.register_fake), avoid it, "
        "or measure with 'planner tune', which runs the model for real.",
    )


def place(trace: TracebackType | None) -> str:
    """`file:line` of the innermost frame outside torch and this package."""
    frames = [f for f in traceback.extract_tb(trace) if not _is_ours_or_torch(f.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "the training step"


def _is_ours_or_torch(filename: str) -> bool:
    parts = filename.replace("\\", "/").split("/")
    return "torch" in parts or "planner" in parts


def _tag_activations(events: Iterable[Event]) -> list[Event]:
    """What a forward leaves alive at its end is saved for backward: an activation from the start.

    Storages that have a category of their own (parameters, gradients …) keep it.
    """
    events = list(events)
    categorised = {event.storage for event in events if isinstance(event, Tagged)}
    saved: set[int] = set()
    fresh: set[int] = set()
    for event in events:
        if isinstance(event, Allocated):
            fresh.add(event.storage)
        elif isinstance(event, Freed):
            fresh.discard(event.storage)
        elif isinstance(event, Marked):
            if event.phase == "forward":
                saved |= fresh - categorised
            fresh.clear()
    return list(_with_tags(events, saved))


def _with_tags(events: Iterable[Event], saved: set[int]) -> Iterator[Event]:
    for event in events:
        yield event
        if isinstance(event, Allocated) and event.storage in saved:
            yield Tagged(event.storage, "activations")


def _short_names(events: Iterable[Event]) -> Iterator[Event]:
    """`aten.mm.default` is `aten.mm` in a ledger, as on shapes."""
    for event in events:
        if isinstance(event, Allocated) and event.label.startswith("aten."):
            yield event._replace(label=".".join(event.label.split(".")[:2]))
        else:
            yield event
