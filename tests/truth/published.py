"""Measurements that others published, quoted one a line, beside the estimate:
`python -m tests.truth.published` prints memory, the driver's bytes, then rates of Swins; with
`--models` those of other models, by class of model: each is recorded first, for minutes in all.

A row says where it was printed, under which conditions, and what had to be assumed. Conditions that
no setting has (no optimizer, gradients that nobody clears, the first step) are read from the
ledger: which phases of which step count. Nothing is added by hand.
"""

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from tabulate import tabulate

from planner.core.schema import (
    Model,
    ResolvedSetting,
    SwinConfig,
    TrainSetting,
    parse,
)
from planner.core.torch_version import as_of
from planner.core.units import GIB, MIB
from planner.estimation.arguments import Target
from planner.estimation.estimate import estimate_ledger, resolve
from planner.estimation.ledgers import step_ledger
from planner.ledger.ledger import Allocated, Computed, Freed, Ledger, Operation, PhaseEnded, Tagged
from planner.libraries.names import find_library, resolve_model
from planner.machine.hardware import Gpu, find_gpu
from planner.machine.hardware.overheads import overheads_for
from planner.memory.profile import walk_ledger
from planner.memory.scratch import size_scratch
from planner.step.engine import AutocastScope
from planner.step.nn import name_modules
from planner.step.tensor import Device
from planner.step.training import BuildOnShapes, make_batch
from planner.throughput.prediction import predict_step
from planner.throughput.rates import DeviceRates, rates_for
from tests.memory.requests import played
from tests.truth.compare import accuracy_of, is_swin
from tests.truth.fit import FORMER_RECIPE, HELD_OUT_ONE_IN

PUBLIC = Path(__file__).with_name("public.jsonl")
ROLL = "aten.roll"
# The oldest torch whose memory and whose speed an estimate is held to. Before 2.0 operators kept
# other tensors; before 1.12 matmuls of fp32 ran in TF32 unasked (torch 1.12's release notes).
OLDEST_FOR_MEMORY = (2, 0)
OLDEST_FOR_TIME = (1, 12)

Window = Callable[[int, str, int], bool]  # (step, phase, micro-batch from 1) -> it counts


class PublishedRow(BaseModel):
    """One line of `public.jsonl`.

    `span` is what was timed, and over which memory was watched. `instant` says whether the first
    optimizer step is meant, before the moments, or a later one. `gradients` outlive the span
    ("kept"), live until the loss is known ("kept through forward"), or are set to None after it
    ("released"). `fused_window_process` is the authors' kernel that rolls and partitions at once;
    `not_run` are operations of ours that the measured code does not have; `unmodelled` names what
    was there and no estimate knows: such a row is only listed. `reserved_gb` is decimal, of
    `torch.cuda.max_memory_reserved()`; `device_gib` is nvidia-smi's. Rates are images/s of one
    device. `figures` were printed too, and no estimate prints their like.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    source: str
    quoted: str
    gpu: str | None
    torch: str | None
    model: str
    overrides: dict[str, Any] = Field(default_factory=dict)
    setting: dict[str, Any]
    span: Literal["step", "forward+backward", "forward"]
    instant: Literal["first", "steady"]
    gradients: Literal["released", "kept", "kept through forward", "none"]
    fused_window_process: bool = False
    not_run: list[str] = Field(default_factory=list)
    loads_data: bool = False
    unmodelled: str | None = None
    assumed: list[str]
    allocated_mib: Annotated[float, Field(gt=0)] | None = None
    reserved_gb: Annotated[float, Field(gt=0)] | None = None
    device_gib: Annotated[float, Field(gt=0)] | None = None
    images_per_second: Annotated[float, Field(gt=0)] | None = None
    figures: dict[str, float] = Field(default_factory=dict)

    @cached_property
    def resolved(self) -> tuple[Model, ResolvedSetting]:
        """The model and the setting as its library runs it."""
        model = resolve_model(self.model, {k: str(v) for k, v in self.overrides.items()})
        asked = parse(TrainSetting, self.setting, self.id)
        # The limit on windows whose position bias is trained is none where nothing is trained.
        checked = asked.model_copy(update={"batch_size": 1}) if self.span == "forward" else asked
        config, setting = resolve(model, checked)
        return config, setting.model_copy(update={"batch_size": asked.batch_size})

    @property
    def is_traced(self) -> bool:
        return not is_swin(self.resolved[0])

    @property
    def group(self) -> str:
        """The class of model, in tables."""
        name = self.model.rpartition(":")[2]
        return "Swin" if not self.is_traced else name.partition("_")[0]

    @cached_property
    def device(self) -> Gpu | None:
        return None if self.gpu is None else find_gpu(self.gpu)

    @property
    def torch_version(self) -> tuple[int, int] | None:
        """(major, minor), as far as it is known: the oldest that it can be."""
        if self.torch is None:
            return None
        major, minor = re.match(r"(\d+)(?:\.(\d+))?", self.torch).groups()  # type: ignore[union-attr]
        return int(major), int(minor or 0)

    @property
    def release(self) -> str:
        """The torch that the row is estimated with: its own, or the oldest that one can be of."""
        major, minor = self.torch_version or OLDEST_FOR_MEMORY
        return f"{major}.{minor}"

    @property
    def is_held_out(self) -> bool:
        """Whether the row judges the fit of the rates instead of entering it: a fixed quarter, by
        a hash of what was measured, in which the recipe that was the default says nothing."""
        said = {f: v for f, v in self.setting.items() if FORMER_RECIPE.get(f, ...) != v}
        key = [self.source, self.model, self.overrides, said, self.span]
        return hashlib.sha256(json.dumps(key).encode()).digest()[0] % HELD_OUT_ONE_IN == 0

    @property
    def why_memory_is_only_listed(self) -> str | None:
        """None where the estimate is held to the row."""
        return self._why_only_listed(self.allocated_mib, "nvidia-smi's, an upper bound",
                                     OLDEST_FOR_MEMORY)  # fmt: skip

    @property
    def why_time_is_only_listed(self) -> str | None:
        """None where the estimate is held to the row."""
        if self.gpu is None:
            return "card not named"
        if self.loads_data:
            return "with the loader"
        return self._why_only_listed(self.images_per_second, "not given", OLDEST_FOR_TIME)

    def _why_only_listed(
        self, measured: float | None, without: str, oldest: tuple[int, int]
    ) -> str | None:
        if measured is None:
            return without
        if self.unmodelled is not None:
            return "another head"
        if self.torch_version is None:
            return "torch not named"
        return None if self.torch_version >= oldest else f"torch {self.torch}"


@dataclass(frozen=True)
class Published:
    """A row and how far the planner is off, as (predicted - measured) / measured: in bytes
    allocated at the peak, in bytes reserved, in bytes on the device (other processes and older
    torches only add to what the driver reported) and in images/s (positive: predicted too fast).
    Each is None where the row has no such figure or, for a rate, no card is known."""

    row: PublishedRow
    memory_error: float | None
    reserved_error: float | None
    device_error: float | None
    time_error: float | None

    @property
    def judged_time_error(self) -> float | None:
        """None also where the row is only listed."""
        return self.time_error if self.row.why_time_is_only_listed is None else None


@cache
def read_published() -> tuple[PublishedRow, ...]:
    """The rows of the file, in its order."""
    return tuple(map(PublishedRow.model_validate_json, PUBLIC.read_bytes().splitlines()))


@cache
def compare_published(recorded: bool = False) -> tuple[Published, ...]:
    """Every row of a Swin, or of every model that must be `recorded`, beside what the planner says
    of it with its torch, in order."""
    return tuple(_published(row) for row in read_published() if row.is_traced == recorded)


def _published(row: PublishedRow) -> Published:
    def error(predicted: float | None, measured: float | None) -> float | None:
        return None if predicted is None or measured is None else predicted / measured - 1

    with as_of(row.release):
        allocated, on_device = predicted_allocated(row), predicted_on_device(row)
        reserved = predicted_reserved(row)
        return Published(
            row,
            None if allocated is None else error(allocated / MIB, row.allocated_mib),
            None if reserved is None else error(reserved / 1e9, row.reserved_gb),
            None if on_device is None else error(on_device / GIB, row.device_gib),
            error(predicted_rate(row), row.images_per_second),
        )


def predicted_allocated(row: PublishedRow) -> int | None:
    """`torch.cuda.max_memory_allocated()` over what the row watched; None where it was not read."""
    if row.allocated_mib is None:
        return None
    # In no published log under DDP did the first bucket outlast the first step.
    steps = {0} if row.instant == "first" else {0, 1}

    def peak(counts: Window, **changes: Any) -> int:
        ledger = _evaluated(row) if row.span == "forward" else _ledger(row, **changes)
        if row.fused_window_process:
            ledger = with_fused_windows(ledger)
        outside = overheads_for(row.device, ledger.environment)
        ledger = size_scratch(ledger, outside.processors)
        return peak_allocated(ledger, outside.workspace_bytes, counts)

    if row.span == "forward":
        return peak(lambda step, phase, number: step == 1 and phase == "forward")
    if row.span == "forward+backward":
        # Gradients that nobody clears are there from the second micro-batch of a first step on,
        # when no optimizer has run yet.
        micro = 2 if row.gradients == "kept" else 1
        before = ("forward", "backward")
        return peak(lambda step, phase, number: step == 0 and number == micro and phase in before,
                    accumulate=micro)  # fmt: skip
    if row.gradients != "kept through forward":
        released = row.gradients == "released"
        return peak(lambda step, phase, number: step in steps, zero_grad_to_none=released)
    return max(
        peak(lambda step, phase, number: step in steps and phase == "forward",
             zero_grad_to_none=False),
        peak(lambda step, phase, number: step in steps and phase != "forward"),
    )  # fmt: skip


def predicted_reserved(row: PublishedRow) -> int | None:
    """`torch.cuda.max_memory_reserved()` of a step; None where it was not read. Gradients that are
    kept through forward only are kept all along in one replay, and never in another: the more."""
    if row.reserved_gb is None:
        return None
    ledgers = [
        _ledger(row, zero_grad_to_none=to_none)
        for to_none in (True, False)
        if (row.gradients == "released") <= to_none
    ]
    model, setting = row.resolved
    return max(
        estimate_ledger(model, setting, ledger, Target(row.device)).peak_reserved_bytes
        for ledger in ledgers
    )


def predicted_on_device(row: PublishedRow) -> int | None:
    """What the driver should report; None where it was not read."""
    if row.device_gib is None:
        return None
    config, setting = row.resolved
    kept = setting.model_copy(update={"zero_grad_to_none": row.gradients == "released"})
    target, ledger = Target(row.device), step_ledger(config, kept)
    return estimate_ledger(config, kept, ledger, target).device_total_bytes


def predicted_rate(row: PublishedRow, rates: DeviceRates | None = None) -> float | None:
    """Images/s over what the row timed, by `rates` or by those of its card in the catalogue; None
    where no rate or no card is given."""
    if row.images_per_second is None or row.device is None:
        return None
    model, setting = row.resolved
    rates = rates or rates_for(row.device, model)
    return predict_step(timed_operations(row), rates, setting, 1).images_per_second


def timed_operations(row: PublishedRow) -> list[Operation]:
    """(phase, operation), in order, of what the row timed."""
    operations = list(_ledger(row).operations())
    if row.span != "step":
        if row.is_traced:  # the last of two micro-batches, which finds gradients there
            phases = [phase for phase, _ in operations]
            begun = len(phases) - phases[::-1].index("forward")
            while phases[begun - 1] == "forward":
                begun -= 1
            operations = operations[begun:]
        operations = [(p, o) for p, o in operations if p in row.span.split("+")]
    skipped = {*row.not_run, ROLL} if row.fused_window_process else set(row.not_run)
    return [(p, o) for p, o in operations if o.name not in skipped]


def with_fused_windows(ledger: Ledger) -> Ledger:
    """`ledger` as the authors' fused window process makes it: one tensor where a roll and the copy
    beside it make two. Partitioned, the rolled map is never made; put back, the map that would be
    rolled is not."""
    gone: set[int] = set()
    previous = Allocated(0, 0, "")
    for event in ledger.events:
        if isinstance(event, Allocated):
            if event.label == ROLL:
                put_back = previous.label == "aten.clone" and previous.path == event.path
                gone.add(previous.storage if put_back else event.storage)
            previous = event
    return _without(ledger, gone, ROLL)


def _without(ledger: Ledger, gone: set[int], operation: str | None = None) -> Ledger:
    """`ledger` if the storages of `gone` never were, and `operation` never ran."""
    return replace(
        ledger,
        events=tuple(
            event
            for event in ledger.events
            if not (isinstance(event, Computed) and event.name == operation)
            and not (isinstance(event, Allocated | Freed | Tagged) and event.storage in gone)
        ),
    )


def peak_allocated(ledger: Ledger, workspace_bytes: int, counts: Window) -> int:
    """The most bytes in the allocator's blocks within the phases that `counts` names."""
    walked = walk_ledger(ledger)
    requests = walked.fill_workspaces(workspace_bytes)
    running, _, _ = played(requests, streams=walked.streams)
    inside = _inside(ledger, counts)
    return max(n for n, event in zip(running, walked.event_indices, strict=True) if inside[event])


def _inside(ledger: Ledger, counts: Window) -> list[bool]:
    """By event, whether it lies in a phase that counts. Building the model never does."""
    inside: list[bool] = []
    micro_batch = 1
    for index, event in enumerate(ledger.events):
        if not isinstance(event, PhaseEnded):
            continue
        counted = event.phase != "build" and counts(event.step, event.phase, micro_batch)
        inside += [counted] * (index + 1 - len(inside))
        if event.phase == "backward":
            micro_batch += 1
        elif event.phase == "zero_grad":
            micro_batch = 1
    return inside + [False] * (len(ledger.events) - len(inside))


def _ledger(row: PublishedRow, **changes: Any) -> Ledger:
    """What the row's span is read from: a step, or two passes of a Swin in evaluation. Of any other
    model one recording of two micro-batches serves all spans but the whole step."""
    model, setting = row.resolved
    setting = setting.model_copy(update=changes)
    if isinstance(model, SwinConfig):
        if row.span == "forward":
            build = find_library(model.library).on_shapes(model, setting)
            return _record_forward(build, model, setting)
        return step_ledger(model, setting)
    more = {} if row.span == "step" else {"accumulate": 2}
    return step_ledger(model, setting.model_copy(update=more))


def _evaluated(row: PublishedRow) -> Ledger:
    """Passes in evaluation, for which only the weights are there."""
    model, setting = row.resolved
    if isinstance(model, SwinConfig):
        return _ledger(row)
    module, name = model.parts
    evaluated = model.model_copy(update={"factory": f"{module}:EVALUATED.{name}"})
    ledger = step_ledger(evaluated, setting)
    gone = {
        event.storage
        for event in ledger.events
        if isinstance(event, Tagged) and event.category in ("gradients", "optimizer_state")
    }
    return _without(ledger, gone)


def show_published() -> str:
    """Every row beside the estimate, then how far off in all."""
    found = compare_published()
    summary = []
    for title, errors in (
        ("memory, held",
         [p.memory_error for p in found if p.row.why_memory_is_only_listed is None]),
        ("rate, fitted", [p.judged_time_error for p in found if not p.row.is_held_out]),
        ("rate, held out", [p.judged_time_error for p in found if p.row.is_held_out]),
        ("of these, with a backward",
         [p.judged_time_error for p in found if p.row.is_held_out and p.row.span != "forward"]),
    ):  # fmt: skip
        of = accuracy_of([error for error in errors if error is not None])
        summary.append((title, of.count, f"{of.median:.1%}", f"{of.worst:.1%}"))
    memory = [
        (p.row.id, _conditions(p.row) + (", first step" if p.row.instant == "first" else ""),
         f"{p.row.allocated_mib:.0f} MiB", f"{p.memory_error:+.1%}",
         _listed(p.row.why_memory_is_only_listed, "held"))
        for p in found if p.memory_error is not None
    ]  # fmt: skip
    device = [
        (p.row.id, _conditions(p.row), f"{p.row.device_gib:.1f} GiB", f"{p.device_error:+.1%}",
         "only listed: an upper bound")
        for p in found if p.device_error is not None
    ]  # fmt: skip
    rates = [
        (p.row.id, p.row.gpu, _conditions(p.row), f"{p.row.images_per_second:.0f} images/s",
         f"{p.time_error:+.1%}",
         _listed(p.row.why_time_is_only_listed, "held out" if p.row.is_held_out else "fitted"))
        for p in found if p.time_error is not None
    ]  # fmt: skip
    off = ("conditions", "measured", "off", "")
    tables = [
        tabulate(memory, ("max_memory_allocated", *off)),
        tabulate(device, ("nvidia-smi", *off)),
        tabulate(rates, ("rate", "card", *off)),
        tabulate(summary, ("", "rows", "median error", "worst error")),
        f"Kept, and compared with nothing: {', '.join(p.row.id for p in found if p.row.figures)}.",
    ]
    return "\n\n".join(tables)


def show_models() -> str:
    """The same of other models: by class of model, fitted and held out apart, then every row."""
    found = compare_published(recorded=True)
    classes = []
    for group, held_out in sorted({(p.row.group, p.row.is_held_out) for p in found}):
        alike = [p for p in found if (p.row.group, p.row.is_held_out) == (group, held_out)]
        memory = [p.memory_error for p in alike if p.row.why_memory_is_only_listed is None]
        reserved = [p.reserved_error for p in alike if p.row.unmodelled is None]
        cells = [
            _median_and_worst(errors)
            for errors in (memory, reserved, [p.judged_time_error for p in alike])
        ]
        classes.append((group, "held out" if held_out else "fitted", *cells))
    rows = [
        (p.row.id, _conditions(p.row), *map(_percent, (p.memory_error, p.reserved_error,
         p.time_error)), p.row.unmodelled or ("held out" if p.row.is_held_out else "fitted"))
        for p in found
    ]  # fmt: skip
    off = ("allocated", "reserved", "rate")
    return "\n\n".join(
        (
            tabulate(classes, ("median, worst", "", *off)),
            tabulate(rows, ("", "conditions", *off, "")),
        )
    )


def _median_and_worst(errors: Iterable[float | None]) -> str:
    of = accuracy_of([error for error in errors if error is not None])
    return "" if of is None else f"{of.median:.2%}, {of.worst:.2%} ({of.count})"


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:+.2%}"


def _conditions(row: PublishedRow) -> str:
    _, setting = row.resolved
    parts = [row.span, f"batch {setting.batch_size}", setting.precision]
    if setting.attention not in ("eager", "library"):
        parts.append(setting.attention)
    if setting.parallelism == "ddp":
        parts.append(f"DDP on {setting.world_size}")
    return ", ".join([*parts, f"torch {row.torch or '?'}"])


def _listed(why_only_listed: str | None, otherwise: str) -> str:
    return otherwise if why_only_listed is None else f"only listed: {why_only_listed}"


def _record_forward(build: BuildOnShapes, model: SwinConfig, setting: TrainSetting) -> Ledger:
    """Builds the model on shapes and runs it twice in evaluation, without gradients; returns all
    events. Each pass is the one phase, forward, of a step."""
    device = Device()
    device.channels_last = setting.memory_format == "channels_last"
    module = build(device)
    name_modules(module)
    batch = make_batch(device, model, setting)
    device.mark("build", 0)
    device.training = False
    for step in range(2):
        with device.no_grad(), AutocastScope(device, setting.autocast_dtype):
            module(batch.images)
        device.mark("forward", step)
    num_parameters = sum(p.numel for p in module.parameters())
    return Ledger(tuple(device.events), setting.batch_size, num_parameters)


if __name__ == "__main__":
    print(show_models() if sys.argv[1:] == ["--models"] else show_published())
