"""Measurements that others published, quoted one a line, held against the estimate.

A row says where it was printed, under which conditions, and what had to be assumed. Conditions that
no setting has (no optimizer, gradients that nobody clears, the first step) are read from the
ledger: which phases of which step count. Nothing is added by hand.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from planner.errors import UsageError
from planner.estimation import estimate_ledger, resolve
from planner.files import MAX_RESULT_BYTES, read_text
from planner.hardware import Gpu, find_gpu
from planner.hardware.overheads import overheads_for
from planner.ledger import Allocated, Computed, Freed, Ledger, Marked, Tagged
from planner.ledgers import step_ledger
from planner.libraries.registry import find_library
from planner.libraries.resolve import resolve_model
from planner.memory.profile import walk_ledger
from planner.memory.replay import replay
from planner.schema import ResolvedSetting, SwinConfig, TrainSetting, parse
from planner.step.training import record_forward
from planner.throughput.fusing import Operation
from planner.throughput.prediction import DeviceRates, predict_step, rates_for
from planner.units import GIB, MIB

HELD_OUT_ONE_IN = 4
ROLL = "aten.roll"
# The oldest torch whose memory and whose speed an estimate is held to. Before 2.0 operators kept
# other tensors; before 1.12 matmuls of fp32 ran in TF32 unasked (torch 1.12's release notes).
OLDEST_FOR_MEMORY = (2, 0)
OLDEST_FOR_TIME = (1, 12)

Window = Callable[[int, str, int], bool]  # (step, phase, micro-batch from 1) -> it counts


class PublishedRow(BaseModel):
    """One line of `tests/truth/public.jsonl`.

    `span` is what was timed, and over which memory was watched. `instant` says whether the first
    optimizer step is meant, before the moments, or a later one. `gradients` outlive the span
    ("kept"), live until the loss is known ("kept through forward"), or are set to None after it
    ("released"). `fused_window_process` is the authors' kernel that rolls and partitions at once;
    `not_run` are operations of ours that the measured code does not have; `unmodelled` names what
    was there and no estimate knows: such a row is only listed. `device_gib` is nvidia-smi's. Rates
    are images/s of one device. `figures` were printed too, and no estimate prints their like.
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
    device_gib: Annotated[float, Field(gt=0)] | None = None
    images_per_second: Annotated[float, Field(gt=0)] | None = None
    figures: dict[str, float] = Field(default_factory=dict)

    @cached_property
    def resolved(self) -> tuple[SwinConfig, ResolvedSetting]:
        """The model and the setting as its library runs it."""
        model = resolve_model(self.model, {k: str(v) for k, v in self.overrides.items()})
        asked = parse(TrainSetting, self.setting, self.id)
        # The limit on windows whose position bias is trained is none where nothing is trained.
        checked = asked.model_copy(update={"batch_size": 1}) if self.span == "forward" else asked
        config, setting = resolve(model, checked)
        assert isinstance(config, SwinConfig)
        return config, setting.model_copy(update={"batch_size": asked.batch_size})

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
    def is_held_out(self) -> bool:
        """Whether the row judges the fit of the rates instead of entering it: a fixed quarter, by
        a hash of what was measured."""
        key = [self.source, self.model, self.overrides, self.setting, self.span]
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
    """A row and what the planner says of it: bytes allocated at the peak, bytes on the device and
    images/s, each None where the row has no such figure or, for a rate, no card is known."""

    row: PublishedRow
    allocated_bytes: int | None
    device_bytes: int | None
    images_per_second: float | None

    @property
    def memory_error(self) -> float | None:
        """(predicted - measured) / measured."""
        if self.allocated_bytes is None or self.row.allocated_mib is None:
            return None
        return self.allocated_bytes / MIB / self.row.allocated_mib - 1

    @property
    def device_error(self) -> float | None:
        """Of what the driver reported: other processes and older torches only add to it."""
        if self.device_bytes is None or self.row.device_gib is None:
            return None
        return self.device_bytes / GIB / self.row.device_gib - 1

    @property
    def time_error(self) -> float | None:
        """Of the rate: positive where the device is predicted too fast."""
        if self.images_per_second is None or self.row.images_per_second is None:
            return None
        return self.images_per_second / self.row.images_per_second - 1


def read_published(path: Path) -> list[PublishedRow]:
    """The rows of a file, in its order. Raises UsageError for a file that cannot be read."""
    rows = []
    for number, line in enumerate(read_text(path, MAX_RESULT_BYTES).splitlines(), start=1):
        try:
            data = json.loads(line)
        except ValueError as error:
            raise UsageError(f"line {number} of {path} is not JSON: {error}.") from error
        rows.append(parse(PublishedRow, data, f"line {number} of {path}"))
    return rows


def compare_published(rows: Iterable[PublishedRow]) -> list[Published]:
    """Every row beside what the planner says of it, in order."""
    return [
        Published(row, predicted_allocated(row), predicted_on_device(row), predicted_rate(row))
        for row in rows
    ]


def predicted_allocated(row: PublishedRow) -> int | None:
    """`torch.cuda.max_memory_allocated()` over what the row watched; None where it was not read."""
    if row.allocated_mib is None:
        return None
    config, setting = row.resolved
    last = 0 if row.instant == "first" else 1

    def peak(counts: Window, **changes: Any) -> int:
        changed = setting.model_copy(update=changes)
        if row.span == "forward":
            ledger = _forward_ledger(config, changed)
        else:
            ledger = step_ledger(config, changed)
        if row.fused_window_process:
            ledger = with_fused_windows(ledger)
        return peak_allocated(ledger, overheads_for(row.device).workspace_bytes, counts)

    if row.span == "forward":
        return peak(lambda step, phase, number: step == 1)
    if row.span == "forward+backward":
        # Gradients that nobody clears are there from the second micro-batch of a first step on,
        # when no optimizer has run yet.
        micro = 2 if row.gradients == "kept" else 1
        before = ("forward", "backward")
        return peak(lambda step, phase, number: step == 0 and number == micro and phase in before,
                    accumulate=micro)  # fmt: skip
    if row.gradients != "kept through forward":
        released = row.gradients == "released"
        return peak(lambda step, phase, number: step <= last, zero_grad_to_none=released)
    return max(
        peak(lambda step, phase, number: step <= last and phase == "forward",
             zero_grad_to_none=False),
        peak(lambda step, phase, number: step <= last and phase != "forward"),
    )  # fmt: skip


def predicted_on_device(row: PublishedRow) -> int | None:
    """What the driver should report; None where it was not read."""
    if row.device_gib is None:
        return None
    config, setting = row.resolved
    kept = setting.model_copy(update={"zero_grad_to_none": row.gradients == "released"})
    return estimate_ledger(config, kept, step_ledger(config, kept), row.device).device_total_bytes


def predicted_rate(row: PublishedRow, rates: DeviceRates | None = None) -> float | None:
    """Images/s over what the row timed, by `rates` or by those of its card in the catalogue; None
    where no rate or no card is given."""
    if row.images_per_second is None or row.device is None:
        return None
    _, setting = row.resolved
    operations = timed_operations(row)
    return predict_step(operations, rates or rates_for(row.device), setting, 1).images_per_second


def timed_operations(row: PublishedRow) -> list[Operation]:
    """(phase, operation), in order, of what the row timed."""
    config, setting = row.resolved
    forward = row.span == "forward"
    ledger = _forward_ledger(config, setting) if forward else step_ledger(config, setting)
    operations = list(ledger.operations())
    if row.span == "forward+backward":
        operations = [(p, o) for p, o in operations if p in ("forward", "backward")]
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
    return replace(
        ledger,
        events=tuple(
            event
            for event in ledger.events
            if not (isinstance(event, Computed) and event.name == ROLL)
            and not (isinstance(event, Allocated | Freed | Tagged) and event.storage in gone)
        ),
    )


def peak_allocated(ledger: Ledger, workspace_bytes: int, counts: Window) -> int:
    """The most bytes in the allocator's blocks within the phases that `counts` names."""
    walked = walk_ledger(ledger)
    requests = walked.requests_with(workspace_bytes)
    running = replay(requests, streams=walked.streams).allocated_bytes
    inside = _inside(ledger, counts)
    return max(after for after, event in zip(running, walked.events, strict=True) if inside[event])


def _inside(ledger: Ledger, counts: Window) -> list[bool]:
    """By event, whether it lies in a phase that counts. Building the model never does."""
    inside: list[bool] = []
    micro_batch = 1
    for index, event in enumerate(ledger.events):
        if not isinstance(event, Marked):
            continue
        counted = event.phase != "build" and counts(event.step, event.phase, micro_batch)
        inside += [counted] * (index + 1 - len(inside))
        if event.phase == "backward":
            micro_batch += 1
        elif event.phase == "zero_grad":
            micro_batch = 1
    return inside + [False] * (len(ledger.events) - len(inside))


_FORWARDS: dict[tuple[SwinConfig, ResolvedSetting], Ledger] = {}


def _forward_ledger(config: SwinConfig, setting: ResolvedSetting) -> Ledger:
    """Two passes without gradients, in evaluation; kept, since a row asks for it twice."""
    if (config, setting) not in _FORWARDS:
        build = find_library(config.library).on_shapes(config, setting)
        _FORWARDS[config, setting] = record_forward(build, config, setting)
    return _FORWARDS[config, setting]
