"""The ledger of any model and setting at a batch: from the step on shapes, or from a recording.

Imports no torch: steps are recorded in a process of their own (`planner.recording.recordings`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from planner.core.errors import PlannerError
from planner.core.schema import Model, ResolvedSetting, SwinConfig, TrainSetting
from planner.core.schema.setting import GRAPH_MODES, SHARDED
from planner.core.torch_version import torch_version
from planner.ledger.ledger import RECORDED_MICRO_BATCHES, Ledger, Recorder
from planner.libraries.names import find_library
from planner.machine.hardware import Gpu
from planner.memory.compiled import has_known_graphs, in_graph_pool, is_compiled
from planner.recording import recordings
from planner.step.ranks import is_closed_form
from planner.step.training import has_step, record_training

MAX_HELD = 128  # recordings on shapes that a process holds
Request = tuple[Model, ResolvedSetting, Gpu | None]


def step_ledger(
    model: Model, setting: ResolvedSetting, recorded: bool = False, gpu: Gpu | None = None
) -> Ledger:
    """The events of building the model and of its first two optimizer steps.

    Of a `SwinConfig` on shapes, unless `recorded`; of any other model recorded on a card like
    `gpu`. A compiled step is recorded, or on shapes the recording that is kept; where there is
    none, it is the eager step, which `planner.memory.compiled` says how far to trust. At most
    `RECORDED_MICRO_BATCHES` micro-batches are recorded, since the third repeats the second.
    On several GPUs it is that of one rank: in closed form on shapes, recorded of torch's own DDP
    and FSDP2 and DeepSpeed's own ZeRO.
    Raises PlannerError for what cannot be recorded.
    """
    if is_on_shapes(model, setting, recorded):
        assert isinstance(model, SwinConfig)
        ledger = _kept_compiled(model, setting, gpu) or _eager_on_shapes(model, setting)
    else:
        ledger = recordings.ledger_of(recordings.step_of(model, setting, gpu))
    is_graphed = setting.compile in GRAPH_MODES and is_compiled(ledger)
    return in_graph_pool(ledger) if is_graphed else ledger


def _kept_compiled(config: SwinConfig, setting: ResolvedSetting, gpu: Gpu | None) -> Ledger | None:
    known = has_known_graphs(setting)
    found = recordings.find(recordings.step_of(config, setting, gpu)) if known else None
    return found if isinstance(found, Ledger) else None


def _eager_on_shapes(config: SwinConfig, setting: ResolvedSetting) -> Ledger:
    ledger = _recorder(config, setting).ledger(setting.batch_size)
    drift = find_library(config.library).drift(config)
    return replace(ledger, notes=(*ledger.notes, *drift)) if drift else ledger


def _recorder(config: SwinConfig, setting: ResolvedSetting) -> Recorder:
    """What does not change the events shares a recording."""
    alone = {"world_size": 1, "nodes": 1} if setting.parallelism in ("none", "ddp") else {}
    parts = min(setting.accumulate, RECORDED_MICRO_BATCHES)
    updates = {"batch_size": 1, "accumulate": parts, **alone}
    eager = ResolvedSetting(setting.uncompiled()).model_copy(update=updates)
    return _on_shapes(config, eager, torch_version())


def is_on_shapes(model: Model, setting: TrainSetting, recorded: bool = False) -> bool:
    """Whether the ledger comes from the step on shapes: at once, and without torch. Recorded are
    what torchao does (linear layers that multiply in 8 bits, `adamw-8bit`, optimizers on the host),
    optimizers that have no step there, ZeRO, and what of FSDP2 has no closed form, as a block that
    is checkpointed reentrantly and gathers its weights twice."""
    if not isinstance(model, SwinConfig) or recorded or not has_step(setting):
        return False
    reentrant = find_library(model.library).reentrant
    twice = setting.parallelism in SHARDED and setting.checkpointing in reentrant
    return is_closed_form(setting) and not twice


def record_ledgers(
    requests: Sequence[Request],
    say: Callable[[str], None] | None = None,
    limit_seconds: float | None = None,
    recorded: bool = True,
) -> list[PlannerError | None]:
    """Records what of `requests` is not known, for at most `limit_seconds`; for each of them the
    error that it ended with. What is on shapes is left out unless `recorded`. `say` is told how
    long it takes (standard error, without one)."""
    steps = {r: recordings.step_of(*r) for r in requests if not is_on_shapes(r[0], r[1], recorded)}
    recordings.record(list(steps.values()), say, limit_seconds)
    found = [recordings.find(steps[r]) if r in steps else None for r in requests]
    return [one if isinstance(one, PlannerError) else None for one in found]


@lru_cache(MAX_HELD)
def _on_shapes(config: SwinConfig, alike: ResolvedSetting, torch: tuple[int, int]) -> Recorder:
    """The first batch is recorded as it is, all others are read off one recording of HUGE. What is
    recorded differs with the version of `torch`."""
    build = find_library(config.library).on_shapes(config, alike)

    def record(batch_size: int) -> Ledger:
        at_batch = alike.model_copy(update={"batch_size": batch_size})
        return record_training(build, config, at_batch)

    return Recorder(record)
