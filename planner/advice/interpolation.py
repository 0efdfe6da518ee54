"""The estimate of a choice, from those of other choices: of other batches, fewer micro-batches, or
eager."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from planner.advice.wish import Choice
from planner.core.schema import TrainSetting
from planner.estimation.estimate import Estimate
from planner.ledger.ledger import LEDGER_MICRO_BATCHES
from planner.throughput.result import Throughput

# The numbers of micro-batches that are priced; the times of more are extrapolated from these.
FEW_MICRO_BATCHES = LEDGER_MICRO_BATCHES, LEDGER_MICRO_BATCHES + 1
Combine = Callable[..., float]  # one figure, from that figure at each of the other batches
# The figures of an estimate that follow from the batch; the verdict follows from these.
_BYTES = (
    "breakdown", "saved_activation_bytes", "peak_live_bytes", "peak_allocated_bytes",
    "peak_reserved_bytes", "device_total_bytes", "low_bytes", "high_bytes", "live_bytes",
    "pinned_host_bytes",
)  # fmt: skip


class Interpolation(NamedTuple):
    """How the figures of a choice follow from those of other choices."""

    combine: Combine
    choices: tuple[Choice, ...]

    def estimate(self, setting: TrainSetting, estimates: Sequence[Estimate]) -> Estimate:
        """The estimate of `setting`, without a time, from those of the `choices`: their last one,
        with other bytes."""
        columns = ([getattr(e, name) for e in estimates] for name in _BYTES)
        figures = {n: self._bytes(*values) for n, values in zip(_BYTES, columns, strict=True)}
        return replace(estimates[-1], setting=setting, throughput=None, **figures)

    def _bytes(self, *values: Any) -> Any:
        """Whole bytes, never fewer than 0; of mappings key by key."""
        if isinstance(values[0], Mapping):
            keys = dict.fromkeys(key for value in values for key in value)
            return {key: self._bytes(*(value.get(key, 0) for value in values)) for key in keys}
        return max(0, round(self.combine(*values)))

    def time(self, setting: TrainSetting, times: Sequence[Throughput]) -> Throughput:
        """The time of `setting`, from those of the `choices`: their last one, its parts stretched
        to other seconds."""
        base = times[-1]
        seconds = max(self.combine(*(time.step_seconds for time in times)), 1e-9)
        stretch = seconds / base.step_seconds
        return replace(
            base,
            step_seconds=seconds,
            images_per_second=setting.images_per_device_step / seconds,
            parts=tuple(part._replace(seconds=part.seconds * stretch) for part in base.parts),
            matrix_flops=self.combine(*(time.matrix_flops for time in times)),
            host_seconds=self.combine(*(time.host_seconds for time in times)),
            uncertainty=max(time.uncertainty for time in times),
        )


def on_line(low: TrainSetting, high: TrainSetting, setting: TrainSetting) -> Combine:
    """A figure at the batch of `setting`, from the figure at two batches: on the line through
    them."""
    share = (setting.batch_size - low.batch_size) / (high.batch_size - low.batch_size)
    return lambda a, b: a + (b - a) * share


def extrapolate_to(num_micro_batches: int) -> Combine:
    """From the seconds of FEW_MICRO_BATCHES to those of more: each takes as long as the last."""
    num_added = num_micro_batches - FEW_MICRO_BATCHES[0]
    return lambda fewer, more: fewer + (more - fewer) * num_added


def scale_like_compiled(eager: float, eager_there: float, compiled_there: float) -> float:
    """A compiled figure: in proportion to the eager one as at the batch that was compiled."""
    return eager * compiled_there / eager_there if eager_there else compiled_there
