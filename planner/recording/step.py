"""The training step of a real module on an emulated GPU: its ledger, and torch's own peaks.

It is the step that a probe measures, but that large weights have no values: their pages are never
written, so that a model of any size takes next to no memory of the host.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from planner.core.schema import Model, TrainSetting
from planner.core.schema.distribution import DEEPSPEED
from planner.ledger.ledger import RECORDED_MICRO_BATCHES, Category, Event, Ledger, Marked, Sent
from planner.recording.faults import refuse
from planner.recording.history import Entry, Marks, Pools, history, read_events
from planner.recording.operations import Operations, name_requests
from planner.recording.worlds import (
    STREAMS,
    join_alone,
    let_go,
    steps_until_steady,
    stream_names,
    whole_gradients,
    world_notes,
)
from planner.training.building import build_training, float8_notes, own_part, recipe_of
from planner.training.setting import BUCKET_ELEMENTS
from planner.training.step import Training
from planner.training.tasks.contract import tensors_of
from planner.training.tasks.making import task_for

Phases = list[tuple[str, list[Event]]]
LARGE = 1 << 16  # elements: above this nothing but a weight is made while a model is built
_FILLED = tuple(
    getattr(torch.ops.aten, name).default for name in ("zeros", "ones", "full", "rand", "randn")
)


class Peaks(NamedTuple):
    """What torch says of a steady step that nothing watches: bytes, by torch.cuda's counters."""

    allocated_bytes: int
    reserved_bytes: int
    num_alloc_retries: int


class _Unfilled(TorchDispatchMode):
    """Large tensors get an address and no values."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FILLED and torch.Size(args[0]).numel() > LARGE:
            return torch.empty(args[0], **{k: v for k, v in kwargs.items() if k != "generator"})
        is_large = bool(args) and isinstance(args[0], Tensor) and args[0].numel() > LARGE
        if is_large and func._schema.name.endswith("_") and not func._schema.name.endswith("__"):
            return args[0]
        if is_large and func is torch.ops.aten.any.default:
            # `trunc_normal_` draws again until no value is out of bounds: these never change.
            return torch.zeros((), dtype=torch.bool)
        return func(*args, **kwargs)


def _move(module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """As `module.to(device, dtype)`, by the same requests in the same order; only small tensors,
    whose values a model may read, are copied."""

    def moved(tensor: Tensor) -> Tensor:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if tensor.numel() > LARGE and (tensor.device != device or tensor.dtype != wanted):
            return torch.empty_like(tensor, device=device, dtype=wanted)
        return tensor.to(device, wanted)

    made: nn.Module = module._apply(moved)
    return made


def _build(model: Model, setting: TrainSetting, rank: int = 0) -> Training:
    refuse(model, setting)
    if setting.parallelism != "none":
        torch.cuda.set_device(0)
        join_alone(setting, rank)
    with _Unfilled():  # type: ignore[no-untyped-call]
        task = task_for(model, setting)
        task.module()
    return build_training(Training, task, model, setting, torch.device("cuda", 0), _move)


@contextmanager
def _collector_off() -> Iterator[None]:
    """Lifetimes are those of reference counts within, as in a step that no collection meets."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def record_peaks(model: Model, setting: TrainSetting) -> Peaks:
    """Torch's own peaks of the steady step. Raises what building and training raise."""
    training = _build(model, recipe_of(model, setting))
    with _collector_off():
        for _ in range(steps_until_steady(setting)):
            training.step()
            let_go()
        return _measured(training)


def _measured(training: Training) -> Peaks:
    """Of a further step."""
    torch.cuda.reset_peak_memory_stats()
    training.step()
    stats = torch.cuda.memory_stats()
    allocated, reserved = (stats[f"{kind}_bytes.all.peak"] for kind in ("allocated", "reserved"))
    return Peaks(allocated, reserved, stats["num_alloc_retries"])


def record_ledger(
    model: Model, setting: TrainSetting, workspace_bytes: frozenset[int]
) -> tuple[Ledger, Peaks]:
    """The ledger of building `model` and of its first two optimizer steps, with what a further one
    computes, and torch's peaks of one that nothing watches. `workspace_bytes` are the sizes of
    cuBLAS's workspaces on this card. Raises what building and training raise."""
    setting = recipe_of(model, setting)
    parts = min(setting.accumulate, RECORDED_MICRO_BATCHES)
    setting = setting.model_copy(update={"accumulate": parts})
    marks, num_steps = Marks(), steps_until_steady(setting)
    with _collector_off(), history() as entries, marks.writing():
        training = _build(model, setting)
        marks.name(training.model)
        marks.end("build", 0)
        _tag_build(marks, training)
        for step in range(num_steps):
            training.step(partial(_end_phase, marks, training, step))
            let_go()
    with _collector_off():
        peaks = _measured(training)
    operations, watched = _watched_step(training)
    phases, names = operations.phases, operations.names
    labels = name_requests(entries, watched, names, len(phases), num_steps)
    staying: dict[int, Category] = dict.fromkeys(workspace_bytes, "workspace")
    staying |= _bucket_bytes(phases, training)
    is_zero = setting.parallelism in DEEPSPEED
    buckets = (2 * BUCKET_ELEMENTS, 4 * BUCKET_ELEMENTS) if is_zero else ()
    pools = Pools(staying, stream_names(training.model, setting), STREAMS, buckets)
    events = read_events(entries, marks, labels, pools)
    ledger = Ledger(
        tuple(_with_work(events, phases)), setting.batch_size,
        sum(p.numel() for p in training.model.parameters()),
        (*_notes(training), *operations.notes), unit=str(getattr(training.task, "unit", "")),
        own_optimizer=_own_optimizer(training), is_recorded=True,
    )  # fmt: skip
    return ledger, peaks


def _bucket_bytes(phases: Phases, training: Training) -> dict[int, Category]:
    """The sizes of DDP's buckets: of what it sums, before that was compressed."""
    if training.asked.parallelism != "ddp":
        return {}
    width = training.parameters[0].element_size()
    return {
        e.num_bytes * width // getattr(torch, e.dtype).itemsize: "gradients"
        for _, work in phases for e in work if type(e) is Sent and e.collective == "all_reduce"
    }  # fmt: skip


def _watched_step(training: Training) -> tuple[Operations, list[Entry]]:
    """What a step computes, and the allocator's history over it. What a library compiles for its
    own eager step runs as eager here."""
    operations = Operations(training.model, training.asked)
    eager = nullcontext() if training.asked.compiles else torch.compiler.set_stance("force_eager")
    with _collector_off(), history() as watched, eager, operations.hearing(), operations:
        operations.watch(training.optimizers)
        training.step(operations.end)
    return operations, watched


def _own_optimizer(training: Training) -> str:
    """The class of the one that the task makes."""
    return type(training.optimizer).__name__ if hasattr(training.task, "optimizer") else ""


def _notes(training: Training) -> Iterator[str]:
    yield f"recorded on an emulated GPU with torch {torch.__version__}"
    if training.asked.precision == "fp8":
        yield from float8_notes(training.model, training.asked)
    yield from world_notes(training.model, training.asked)
    if own := _own_optimizer(training):
        yield f"the task makes its optimizer ({own})"


def _tag_build(marks: Marks, training: Training) -> None:
    marks.tag(map(own_part, training.model.parameters()), "parameters")
    marks.tag(training.model.buffers(), "buffers")
    marks.tag(tensors_of(training.batch), "activations")
    marks.tag(training.average or (), "optimizer_state")


def _end_phase(marks: Marks, training: Training, step: int, phase: str) -> None:
    marks.end(phase, step)
    if phase == "backward":
        weights = [p for p in training.parameters if p.grad is not None]
        marks.tag([p.grad for p in weights if p.grad is not None], "gradients", weights)
        marks.tag(whole_gradients(training.model, training.asked), "gradients")
    elif phase == "optimizer":
        marks.tag(_state(training), "optimizer_state")


def _state(training: Training) -> Iterator[Tensor]:
    known = {id(parameter) for parameter in training.model.parameters()}
    for optimizer in training.optimizers:
        for state in getattr(optimizer, "state", {}).values():
            yield from tensors_of(state)
        for group in getattr(optimizer, "param_groups", ()):  # ZeRO's copies in fp32
            yield from (weight for weight in group["params"] if id(weight) not in known)
    if training.scaler is not None:
        scale = training.scaler._scale, training.scaler._growth_tracker
        yield from (tensor for tensor in scale if tensor is not None)


def _with_work(events: list[Event], phases: Phases) -> Iterator[Event]:
    """What a phase computed before the mark of its end, in every step."""
    place = 0
    for event in events:
        if type(event) is Marked and event.phase != "build":
            yield from phases[place % len(phases)][1]
            place += 1
        yield event
