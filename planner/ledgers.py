"""The ledger of any model and setting, at any batch. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from planner.affine import Recorder
from planner.ledger import Ledger
from planner.libraries.registry import find_library
from planner.schema import ResolvedSetting, SwinConfig, TrainSetting
from planner.step.compiled.modes import is_one_graph, shares_a_ledger
from planner.step.training import BuildOnShapes, record_training

if TYPE_CHECKING:
    from planner.step.compiled.ledger import CompiledRecorder

# One ledger holds at most so many micro-batches: the third repeats the second.
RECORDED_MICRO_BATCHES = 2

_RECORDERS: dict[tuple[SwinConfig, TrainSetting], Recorder | CompiledRecorder] = {}


def step_ledger(config: SwinConfig, setting: ResolvedSetting) -> Ledger:
    """The events of building the model and of its first two optimizer steps.

    Kept per model and setting: other batch sizes are read from two recordings. At most
    `RECORDED_MICRO_BATCHES` micro-batches are recorded, since the third repeats the second.
    """
    mode = shares_a_ledger(setting.compile) if is_one_graph(config, setting) else "off"
    # What does not change the events shares a recording.
    alike = setting.model_copy(
        update={
            "batch_size": 1,
            "accumulate": min(setting.accumulate, RECORDED_MICRO_BATCHES),
            "compile": mode,
        }
    )
    recorder = _RECORDERS.get((config, alike))
    if recorder is None:
        build = find_library(config.library).on_shapes(config, setting)

        def record(batch_size: int) -> Ledger:
            at_batch = alike.model_copy(update={"batch_size": batch_size})
            return record_training(build, config, at_batch)

        recorder = Recorder(record) if mode == "off" else _compiled(build, config, alike)
        _RECORDERS[config, alike] = recorder
    ledger = recorder.ledger(setting.batch_size)
    drift = find_library(config.library).drift(config)
    return replace(ledger, notes=(*ledger.notes, *drift)) if drift else ledger


def _compiled(build: BuildOnShapes, config: SwinConfig, setting: TrainSetting) -> CompiledRecorder:
    from planner.step.compiled.ledger import CompiledRecorder

    return CompiledRecorder(build, config, setting)
