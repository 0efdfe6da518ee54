"""Estimates of a step at a batch where it was not recorded, from recordings at others: for choosing
what to record, never for an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from planner.core.schema import TrainSetting
from planner.estimation.estimate import Estimate
from planner.throughput.result import Throughput

if TYPE_CHECKING:
    from planner.throughput.prediction import StepTime

TimeT = TypeVar("TimeT", bound="Throughput | StepTime")
Combine = Callable[..., float]
# Of an estimate, what follows from the batch; the verdict follows from these.
_BYTES = (
    "breakdown", "saved_activation_bytes", "peak_live_bytes", "peak_allocated_bytes",
    "peak_reserved_bytes", "device_total_bytes", "low_bytes", "high_bytes", "live_bytes",
    "pinned_host_bytes",
)  # fmt: skip


def between(low: Estimate, high: Estimate, setting: TrainSetting) -> Estimate:
    """On the line through two estimates of one step at other batches, or beyond them."""
    return combined(on_line(low.setting, high.setting, setting), setting, high, low, high)


def on_line(low: TrainSetting, high: TrainSetting, setting: TrainSetting) -> Combine:
    """Of a figure at two batches that at the batch of `setting`."""
    share = (setting.batch_size - low.batch_size) / (high.batch_size - low.batch_size)
    return lambda a, b: a + (b - a) * share


def combined(by: Combine, setting: TrainSetting, like: Estimate, *of: Estimate) -> Estimate:
    """`like`, with the figures that `by` makes of those `of` others."""
    figures = {name: _mixed(by, *(getattr(one, name) for one in of)) for name in _BYTES}
    total, budget = figures["device_total_bytes"], like.budget_bytes
    times = [one.throughput for one in of]
    time = like.throughput
    if time is not None and all(times):
        time = combined_time(by, setting, time, *times)
    return replace(
        like, setting=setting, throughput=time, **figures,
        fits=None if budget is None else total <= budget,
        headroom_bytes=None if budget is None else budget - total,
    )  # fmt: skip


def combined_time(by: Combine, setting: TrainSetting, like: TimeT, *of: Any) -> TimeT:
    """The parts of its seconds are those of `like`, stretched."""
    seconds = max(by(*(one.step_seconds for one in of)), 1e-9)
    stretch = seconds / like.step_seconds
    return replace(
        like,
        step_seconds=seconds,
        images_per_second=setting.batch_size * setting.accumulate / seconds,
        parts=tuple(part._replace(seconds=part.seconds * stretch) for part in like.parts),
        matrix_flops=by(*(one.matrix_flops for one in of)),
        host_seconds=by(*(one.host_seconds for one in of)),
        uncertainty=max(one.uncertainty for one in of),
    )


def _mixed(by: Combine, *of: Any) -> Any:
    if isinstance(of[0], Mapping):
        names = dict.fromkeys(name for one in of for name in one)
        return {name: _mixed(by, *(one.get(name, 0) for one in of)) for name in names}
    return max(0, round(by(*of)))
