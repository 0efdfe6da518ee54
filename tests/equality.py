"""What it means that a step on shapes is the real module's: torch's own CUDA code, on an emulated
GPU, allocates and reserves as much at its peak."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter

from planner.core.schema import Model, ResolvedSetting, SwinConfig, TrainSetting
from planner.core.units import MIB
from planner.estimation.estimate import estimate_ledger
from planner.estimation.ledgers import step_ledger
from planner.ledger.ledger import Event, Freed, Ledger, Tagged
from planner.machine.hardware import Gpu, find_gpu
from planner.recording.recordings import RecordingServer, recorder

CARD = "a100-sxm-80gb"
SEGMENT = 2 * MIB  # blocks of one size may be taken in another order of addresses


def torch_peaks(
    recorder: RecordingServer, model: Model, setting: TrainSetting, gpu: Gpu | None = None
) -> tuple[int, int]:
    """Bytes allocated and reserved of a steady step that nothing watches, in a process of its own.
    Raises PlannerError."""
    found = recorder.ask("tests.equality:measured_peaks", model, setting, gpu)
    assert isinstance(found, dict)
    return found["allocated"], found["reserved"]


def measured_peaks(model: Model, setting: TrainSetting) -> dict[str, int]:
    """In the warm process."""
    from torch.cuda import memory

    from planner.recording import step

    training = step._build(model, step.recipe_of(model, setting))
    with step._collector_off():
        for _ in range(step.steps_until_steady(setting)):
            training.step()
            step.finish_collectives()
        memory.reset_peak_memory_stats()
        training.step()
    return {"allocated": memory.max_memory_allocated(), "reserved": memory.max_memory_reserved()}


def assert_as_torch(config: SwinConfig, setting: ResolvedSetting, error: float = 0.0) -> None:
    """Allocated to the byte, reserved but for a segment; or both within a share of `error`."""
    gpu = find_gpu(CARD)
    found = estimate_ledger(config, setting, step_ledger(config, setting, gpu=gpu), gpu)
    allocated, reserved = torch_peaks(recorder, config, setting, gpu)
    off = found.peak_allocated_bytes - allocated, found.peak_reserved_bytes - reserved
    assert abs(off[0]) <= error * allocated, off
    assert abs(off[1]) <= max(SEGMENT, error * reserved), off


def recorded(model: Model, setting: TrainSetting) -> Ledger:
    """The real module's step, as torch's own CUDA code makes it. Raises PlannerError."""
    return recorder.record(model, ResolvedSetting(setting), find_gpu(CARD))


def in_canonical_order(events: Iterable[Event]) -> list[Event]:
    """The events with each run of releases, and each run of tags, ordered by storage: their order
    within one instant is arbitrary (autocast empties a hash map) and moves no size."""
    ordered: list[Event] = []
    for kind, run in groupby(events, type):
        alike = list(run)
        if kind in (Freed, Tagged):
            alike.sort(key=itemgetter(0))
        ordered += alike
    return ordered
