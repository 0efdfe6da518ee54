"""The ledger of a real module, from a trace: read exactly as one of a step on shapes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import torch

from planner.core.errors import UnsupportedError
from planner.core.schema import FactoryModel, Model, SwinConfig, TrainSetting
from planner.core.schema.distribution import SHARDED
from planner.core.schema.setting import GRAPH_MODES
from planner.ledger.ledger import (
    WORKSPACE_VARIABLE,
    Allocated,
    Event,
    Freed,
    Ledger,
    Marked,
    Scratch,
    Tagged,
)
from planner.libraries.building import Build, build_for
from planner.memory.compiled import in_graph_pool
from planner.step.reducer_notes import bound
from planner.trace.compiled import compile_regions
from planner.trace.faults import BrokenTraceError, trace_error
from planner.trace.run import trace_training


def trace_estimate(
    model: Model,
    setting: TrainSetting,
    build: Build | None = None,
    num_steps: int | None = None,
) -> Ledger:
    """The optimizer steps of the real module on fake tensors, with gradients summed as eager does:
    `num_steps`, by default `steps_until_steady`. Compiled, its forward and backward are the kernels
    of torch's own graph at the setting's batch.

    `build` makes the module; without it, the library of a `SwinConfig` or the factory that a
    `FactoryModel` names. Raises UnsupportedError for what a trace does not follow (a value that
    depends on data), and PlannerError with the line of code where the step fails on shapes.
    """
    _check(model, setting)
    setting = setting.with_recipe(isinstance(model, SwinConfig))
    build = build or build_for(model, setting)
    compiled = compile_regions(build, model, setting) if setting.compile != "off" else None
    try:
        trace = trace_training(
            build, model, setting, num_steps, "in_place", detailed=True, compiled=compiled
        )
    except BrokenTraceError as broken:
        raise trace_error(model, broken) from broken.__cause__
    notes = (
        f"traced on fake tensors with torch {torch.__version__}",
        "of the scratch memory that CUDA kernels take for themselves the trace counts what sums, "
        "norms, softmax, convolutions, pooling, embeddings and index_put take, and no other",
        *trace.assumptions,
        *([f"the task makes its optimizer ({trace.own_optimizer})"] if trace.own_optimizer else []),
    )
    end = max(i for i, event in enumerate(trace.events) if isinstance(event, Marked)) + 1
    events = tuple(_short_names(_tag_activations(trace.events[:end])))
    of_factory = isinstance(model, FactoryModel)
    ledger = Ledger(
        events, setting.batch_size, trace.num_parameters, notes,
        unit=trace.unit, own_optimizer=trace.own_optimizer,
        workspace_config=os.environ.get(WORKSPACE_VARIABLE, "") if of_factory else "",
    )  # fmt: skip
    ledger = bound(ledger, setting)
    return in_graph_pool(ledger) if setting.compile in GRAPH_MODES else ledger


def _check(model: Model, setting: TrainSetting) -> None:
    """Raises UnsupportedError for what a trace does not follow."""
    faults, ways = [], []
    if setting.parallelism not in ("none", "ddp", *SHARDED):
        faults.append(f"a trace follows one device, not parallelism {setting.parallelism}.")
        ways.append("Choose parallelism none, ddp, fsdp or hsdp.")
    if not isinstance(model, SwinConfig) and (setting.frozen_stages or setting.lora_rank):
        faults.append(f"frozen stages and LoRA are not known of {model.title}.")
        ways.append("Omit these options; freeze and adapt inside a factory of your own.")
    if faults:
        raise UnsupportedError("\n".join(faults), " ".join(ways))
    if setting.parallelism in SHARDED:
        _check_sharded(setting)


def _check_sharded(setting: TrainSetting) -> None:
    """What was never laid beside real ranks: gathered weights come and go in all of these."""
    for field, followed in (("compile", "off"), ("offload", "none")):
        if (value := getattr(setting, field)) != followed:
            raise UnsupportedError(
                f"a trace follows FSDP2 in eager steps that keep activations on the device, and "
                f"{field} is {value}.",
                f"Set {field}={followed}, or choose parallelism ddp.",
            )


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
        if isinstance(event, Allocated | Scratch) and event.label.startswith("aten."):
            yield event._replace(label=".".join(event.label.split(".")[:2]))
        else:
            yield event
