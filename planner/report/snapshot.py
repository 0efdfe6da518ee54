"""A predicted training as a snapshot of torch's allocator, in a file that memory_viz opens."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.core.files import check_output, write_output
from planner.estimation.arguments import (
    ModelLike,
    SettingLike,
    allocator_here,
    read_gpu,
    read_memory,
)
from planner.estimation.estimate import choose, may_reserve
from planner.estimation.ledgers import step_ledger
from planner.ledger.ledger import Ledger
from planner.machine.hardware import Gpu
from planner.machine.hardware.overheads import overheads_for
from planner.memory.allocator_config import AllocatorConfig
from planner.memory.predicted_snapshot import predicted_snapshot
from planner.memory.scratch import on_device
from planner.memory.snapshot import SNAPSHOT_ENDINGS

PROTOCOL = 4  # what torch's own dumps have; memory_viz reads pickles with code of its own


def memory_snapshot(
    model: ModelLike,
    setting: SettingLike | None = None,
    *,
    gpu: str | Gpu | None = None,
    memory_bytes: int | str | None = None,
    allocator: str | AllocatorConfig | None = None,
    traced: bool = False,
    **overrides: Any,
) -> dict[str, Any]:
    """The predicted training as `torch.cuda.memory._snapshot()` would have it after the third
    step: the model is built, the first step run, and the steady one twice.

    The arguments are those of `planner.estimate`, and so are its errors. The dictionary is what
    torch.cuda._memory_viz takes.
    """
    device, memory, chosen = read_gpu(gpu), read_memory(memory_bytes), allocator_here(allocator)
    config, resolved = choose(model, setting, device, overrides)
    return snapshot_on(step_ledger(config, resolved, traced), device, memory, chosen)


def snapshot_on(
    ledger: Ledger, gpu: Gpu | None, memory_bytes: int | None, allocator: AllocatorConfig | None
) -> dict[str, Any]:
    """The snapshot of a ledger on a device, as its estimate plays it."""
    allowed = may_reserve(gpu, memory_bytes, allocator)
    outside = overheads_for(gpu, ledger.environment)
    ledger = on_device(ledger, outside.processors)
    return predicted_snapshot(ledger, outside.workspace_bytes, allocator, allowed)


def write_snapshot(snapshot: Mapping[str, Any], path: str | Path) -> Path:
    """Writes a snapshot as `torch.cuda.memory._dump_snapshot` does. Raises as `check_output`, and
    PlannerError where the disk is full."""
    path = check_output(path, "a snapshot", SNAPSHOT_ENDINGS)
    return write_output(path, pickle.dumps(dict(snapshot), protocol=PROTOCOL))
