"""Estimates of a whole space of settings for the device at hand, in seconds: settings that differ
only in what hardly moves memory share one recorded step."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from planner.core.errors import UnsupportedError
from planner.core.schema import DeviceInfo, Model, ResolvedSetting, TrainSetting
from planner.core.schema.distribution import ALONE
from planner.core.schema.setting import GRAPH_MODES
from planner.estimation.estimate import Estimate, choose, estimate_ledger, resolve
from planner.estimation.ledgers import is_on_shapes, record_ledgers, step_ledger
from planner.ledger.ledger import RECORDED_MICRO_BATCHES, Ledger
from planner.machine.hardware import Gpu, recognise_gpu
from planner.memory.allocator_config import AllocatorConfig
from planner.memory.profile import growth_within
from planner.recording import kept
from planner.throughput.prediction import DeviceRates, rates_for
from planner.throughput.result import Throughput, exchanges_of, step_time

if TYPE_CHECKING:
    from planner.throughput.prediction import StepTime


# Estimates of a step at a batch where it was not recorded, from recordings at others: for choosing
# what to record, never for an answer.

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


Key = tuple[Model, TrainSetting]


class DeviceEstimator:
    """Estimates settings for `device`, by the catalogue's rates: of a device that is not in it, its
    memory alone.

    `allocator` are the caching allocator's options that a probe will run with; None are torch's
    defaults.

    What settings are given of another's memory: a compiled one that of the eager one, which is what
    it may need at most unless it is checkpointed and compiled whole (torch's partitioner may then
    recompute all blocks at once, torch 2.13), and with CUDA graphs besides what the optimizer needs
    for its step, since their pool is not given back to it; tf32 that of fp32; fp16 that of bf16,
    which keeps as many bytes; a fused optimizer that of the one in many kernels, which needs more
    while it steps. Their times are the shared step's, corrected for precision, compilation and the
    optimizer.
    None for a setting that is not modelled (which can still be probed). Where only its parallelism
    is not, one device's estimate stands for it: `stood_in` has those.
    """

    def __init__(
        self,
        device: DeviceInfo,
        allocator: AllocatorConfig | None = None,
    ) -> None:
        self.device = device
        self.allocator = allocator
        cuda = device.kind == "cuda"
        self.gpu: Gpu | None = recognise_gpu(device.name, device.total_bytes) if cuda else None
        # (parallelism, checkpointing) for which one device's estimate stands, and with their own.
        self.stood_in: set[tuple[str, str]] = set()
        self.estimated: set[tuple[str, str]] = set()
        self._shared: dict[Key, tuple[Estimate, Ledger] | UnsupportedError] = {}
        self._optimizers: dict[Key, tuple[float, int]] = {}
        self._batches: dict[Key, list[int]] = {}  # that steps were recorded at

    def record(
        self, model: Model, settings: Iterable[TrainSetting], limit_seconds: float | None = None,
        say: Callable[[str], None] | None = None,
    ) -> str:  # fmt: skip
        """Records what estimates of `settings` rest on, where there is no step on shapes: each step
        at three batches, between which the others lie. Returns why not even one of them can be
        estimated, "" where one can.

        Only what was recorded here is estimated later: no estimate begins a recording.
        """
        wanted = self.steps_of(model, settings)
        requests = [(model, one, self.gpu) for one in wanted]
        errors = record_ledgers(requests, say, limit_seconds)
        known = [one for one in wanted if self._is_known(model, one)]
        for one in sorted(known, key=lambda one: one.batch_size):
            self._batches.setdefault((model, _any_batch(one)), []).append(one.batch_size)
        if known or not wanted:
            return ""
        return next((e.message for e in errors if e is not None), "no step was recorded in time")

    def steps_of(self, model: Model, settings: Iterable[TrainSetting]) -> list[ResolvedSetting]:
        """What is recorded for estimates of `settings`; none of what is on shapes."""
        settings = [self._as_it_runs(setting) for setting in settings]
        settings = list(dict.fromkeys(s for each in settings for s in (each, on_one_device(each))))
        steps: dict[TrainSetting, list[ResolvedSetting]] = {}
        bare: dict[ResolvedSetting, None] = {}
        for setting in settings:
            if setting.batch_size == 1 or is_on_shapes(model, setting):
                continue
            with suppress(UnsupportedError):
                resolved = resolve(model, self.shared_setting(setting))[1]
                steps.setdefault(_any_batch(resolved), []).append(resolved)
                bare[resolve(model, _bare(setting))[1]] = None
        return list(dict.fromkeys([*(s for of in steps.values() for s in _spread(of)), *bare]))

    def __call__(self, model: Model, setting: TrainSetting) -> Estimate | None:
        as_it_runs = self._as_it_runs(setting)
        for stand_in in dict.fromkeys((as_it_runs, on_one_device(as_it_runs))):
            try:
                found = replace(self._call(model, stand_in), setting=setting)
            except UnsupportedError:
                continue
            stands_in = stand_in != as_it_runs
            kinds = self.stood_in if stands_in else self.estimated
            kinds.add((setting.parallelism, setting.checkpointing))
            return found
        return None

    def _as_it_runs(self, setting: TrainSetting) -> TrainSetting:
        """On a CPU an offload moves nothing: its tensors are on the host already."""
        if self.device.kind != "cpu":
            return setting
        return setting.model_copy(update={"offload": "none", "offload_optimizer": "none"})

    def _call(self, model: Model, setting: TrainSetting) -> Estimate:
        shared = self.shared_setting(setting)
        ends = self._around(model, shared)
        if ends:
            at = [setting.model_copy(update={"batch_size": batch}) for batch in ends]
            return between(self._call(model, at[0]), self._call(model, at[1]), setting)
        if (model, shared) not in self._shared:
            self._shared[model, shared] = self._estimate(model, shared)
        found = self._shared[model, shared]
        if isinstance(found, UnsupportedError):
            raise found
        estimate, ledger = found
        if shared == setting:
            return estimate
        if setting.compile in GRAPH_MODES:
            estimate = _beside_a_pool(estimate, self._of_optimizer(model, setting)[1])
        time = self._timed(model, setting, estimate, ledger)
        return replace(estimate, setting=setting, throughput=time)

    def shared_setting(self, setting: TrainSetting) -> TrainSetting:
        """The setting whose recorded step stands for that of `setting`."""
        alike = {"tf32": "fp32"}
        if (self.device.capability or (0, 0)) >= (8, 0):
            alike["fp16"] = "bf16"
        changes = {"precision": alike.get(setting.precision, setting.precision)}
        if setting.optimizer_implementation != "8bit":
            changes["optimizer"] = setting.optimizer_family
        return setting.uncompiled().model_copy(update=changes)

    def _estimate(
        self, model: Model, setting: TrainSetting
    ) -> tuple[Estimate, Ledger] | UnsupportedError:
        try:
            config, chosen = choose(model, setting, self.gpu, {})
            ledger = self._ledger(config, chosen)
            rates = self._rates(config)
            found = estimate_ledger(
                config, chosen, ledger, self.gpu, allocator=self.allocator, rates=rates
            )
            return found, ledger
        except UnsupportedError as error:
            return error

    def _around(self, model: Model, shared: TrainSetting) -> tuple[int, int] | None:
        """The recorded batches between which a step lies; None where it was recorded itself, or is
        on shapes."""
        if not self._batches:
            return None
        known = self._batches.get((model, _any_batch(resolve(model, shared)[1])), [])
        if len(known) < 2 or shared.batch_size in known:
            return None
        at = min(max(bisect(known, shared.batch_size), 1), len(known) - 1)
        return known[at - 1], known[at]

    def _is_known(self, model: Model, setting: ResolvedSetting) -> bool:
        return isinstance(kept.find(kept.step_of(model, setting, self.gpu)), Ledger)

    def _ledger(self, model: Model, setting: ResolvedSetting) -> Ledger:
        """Raises UnsupportedError for a step that would have to be recorded."""
        if not is_on_shapes(model, setting) and not self._is_known(model, setting):
            raise UnsupportedError("it was not recorded")
        return step_ledger(model, setting, gpu=self.gpu)

    def _timed(
        self, model: Model, setting: TrainSetting, shared: Estimate, ledger: Ledger
    ) -> Throughput | None:
        """The time of the shared step, run in the precision and the compile mode of `setting`; its
        optimizer's part made that of the implementation. What its seconds go into is not said."""
        rates = self._rates(model)
        if rates is None:
            return None
        plain = setting.model_copy(update={"optimizer": shared.setting.optimizer})
        time = step_time(ledger, plain, rates, exchanges_of(ledger, plain, self.gpu))
        assert time is not None, "there are rates"
        seconds = time.step_seconds
        if plain != setting:
            own, other = (self._of_optimizer(model, s)[0] for s in (setting, plain))
            seconds += time.phase_seconds.get("optimizer", 0.0) * (own / other - 1 if other else 0)
        images = setting.batch_size * setting.accumulate
        return Throughput(seconds, images / seconds, time.basis, time.uncertainty)

    def _rates(self, model: Model) -> DeviceRates | None:
        """Surer of a Swin than of another model."""
        return None if self.gpu is None else rates_for(self.gpu, model)

    def _of_optimizer(self, model: Model, setting: TrainSetting) -> tuple[float, int]:
        """(seconds, bytes) that the optimizer takes within its step: at a small batch, with which
        it has nothing to do. 0 seconds without rates."""
        at = _bare(setting)
        if (model, at) not in self._optimizers:
            ledger = self._ledger(*choose(model, at, self.gpu, {}))
            time = step_time(ledger, at, self._rates(model))
            seconds = 0.0 if time is None else time.phase_seconds.get("optimizer", 0.0)
            self._optimizers[model, at] = seconds, growth_within(ledger, "optimizer")
        return self._optimizers[model, at]


def on_one_device(setting: TrainSetting) -> TrainSetting:
    """The step of one device by itself."""
    return setting.model_copy(update=ALONE)


def _bare(setting: TrainSetting) -> TrainSetting:
    """A small step with the optimizer of `setting`, to see only that: precision matters to an
    optimizer only where the parameters themselves are kept in it."""
    changes = {
        "batch_size": 2, "accumulate": 1, "checkpointing": "none",
        "precision": "fp32" if setting.precision != "pure-bf16" else setting.precision,
    }  # fmt: skip
    return setting.uncompiled().model_copy(update=changes)


def _spread(settings: list[ResolvedSetting]) -> list[ResolvedSetting]:
    """The smallest batch, the middle one and the largest."""
    known = sorted(settings, key=lambda setting: setting.batch_size)
    return list(dict.fromkeys((known[0], known[-1], known[len(known) // 2])))


def _any_batch(setting: TrainSetting) -> TrainSetting:
    parts = min(setting.accumulate, RECORDED_MICRO_BATCHES)
    return setting.model_copy(update={"batch_size": 1, "accumulate": parts})


def _beside_a_pool(found: Estimate, more: int) -> Estimate:
    """`found` with `more` bytes that cannot come from the pool of its graphs."""
    total = found.device_total_bytes + more
    temporaries = found.breakdown["temporaries"] + more
    spare = None if found.budget_bytes is None else found.budget_bytes - total
    return replace(
        found,
        breakdown={**found.breakdown, "temporaries": temporaries},
        peak_allocated_bytes=found.peak_allocated_bytes + more,
        peak_reserved_bytes=found.peak_reserved_bytes + more,
        device_total_bytes=total,
        low_bytes=found.low_bytes + more,
        high_bytes=found.high_bytes + more,
        fits=None if spare is None else spare >= 0,
        headroom_bytes=spare,
    )
