"""Estimates on several devices beside one: the rate that they reach together, and what is lost."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from planner.core.errors import refuse_if
from planner.core.schema import Model, ResolvedSetting, TrainSetting
from planner.estimation.arguments import Target
from planner.estimation.estimate import Estimate, resolve
from planner.estimation.ledgers import step_ledger
from planner.machine.hardware.gpu import Gpu, lacks
from planner.memory.compiled import is_compiled
from planner.throughput.prediction import step_time
from planner.throughput.rates import rates_for


@dataclass(frozen=True)
class Scaled:
    """An estimate of several devices. `efficiency` is their rate over that of as many devices that
    each work alone; None where no rate is predicted, or not what they exchange."""

    estimate: Estimate
    efficiency: float | None

    def as_json(self) -> dict[str, Any]:
        """As `planner estimate --json` prints it, under "scaling"."""
        setting, predicted = self.estimate.setting, self.estimate.throughput
        return {
            "gpus": setting.world_size, "nodes": setting.nodes,
            "global_batch": setting.global_batch, "efficiency": self.efficiency,
            "all_images_per_second": predicted.all_images_per_second if predicted else None,
        }  # fmt: skip


def scaled(estimates: Sequence[Estimate], target: Target) -> list[Scaled]:
    """Each of `estimates` beside one device alone. Of the estimates that differ only in their
    devices and batch, that device runs the step of the one with the fewest devices."""
    alone: dict[TrainSetting, tuple[float | None, bool]] = {}
    rows = []
    for estimate in estimates:
        group = _group(estimate.setting)
        if group not in alone:
            members = [e for e in estimates if _group(e.setting) == group]
            fewest = min(members, key=lambda e: e.setting.world_size)
            alone[group] = _rate_alone(fewest, target)
        rate, is_eager = alone[group]
        rows.append(_scaled(estimate, rate if is_eager == estimate.as_eager else None))
    return rows


def spread_over_gpus(
    rows: Sequence[tuple[Model, ResolvedSetting]], gpus: Sequence[Gpu]
) -> tuple[list[tuple[Gpu | None, Model, ResolvedSetting]], list[str]]:
    """`rows` on each GPU that has their precision, in fp16 where the GPU has no bf16; and a line
    for each precision that some GPUs lack. Raises UsageError where all do."""
    on_each: list[tuple[Gpu | None, Model, ResolvedSetting]] = []
    without: dict[str, dict[str, None]] = {}
    for (model, setting), gpu in itertools.product(rows, gpus):
        if lacks(gpu, setting.precision):
            without.setdefault(setting.precision, {})[gpu.name] = None
            if setting.precision != "bf16":
                continue
            setting = setting.model_copy(update={"precision": "fp16"})
        on_each.append((gpu, model, setting))
    notes = []
    for precision, cards in without.items():
        instead = "fp16 instead" if precision == "bf16" else "left out"
        named = ", ".join(cards) if len(cards) < 9 else f"{len(cards)} cards ('planner gpus')"
        notes.append(f"Without {precision}, and so {instead}: {named}.")
    refuse_if(not on_each, " ".join(notes), "Choose another --precision, or another GPU.")
    return on_each, notes


def _group(setting: TrainSetting) -> TrainSetting:
    return setting.on_one_device().model_copy(update={"batch_size": 1})


def _rate_alone(row: Estimate, target: Target) -> tuple[float | None, bool]:
    """The images per second of one device by itself, and whether an eager step stands for a
    compiled one."""
    _, setting = resolve(row.model, row.setting.on_one_device())
    if setting == row.setting:
        return row.throughput.images_per_second if row.throughput else None, row.as_eager
    if target.gpu is None:
        return None, row.as_eager
    ledger = step_ledger(row.model, setting, target.recorded, target.gpu)
    time = step_time(ledger, setting, rates_for(target.gpu, row.model))
    return time.images_per_second, setting.compile != "off" and not is_compiled(ledger)


def _scaled(estimate: Estimate, alone: float | None) -> Scaled:
    predicted, efficiency = estimate.throughput, None
    if predicted is not None and alone and predicted.is_whole:
        efficiency = predicted.images_per_second / alone
    return Scaled(estimate, efficiency)
