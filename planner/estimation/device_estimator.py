"""Estimates of a whole space of settings for the device at hand, in seconds: settings that differ
only in what hardly moves memory share one recorded step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from planner.core.errors import UnsupportedError
from planner.core.schema import DeviceInfo, Model, ResolvedSetting, TrainSetting
from planner.core.schema.setting import ALONE, GRAPH_MODES
from planner.estimation.estimate import Estimate, choose, estimate_ledger, resolve
from planner.estimation.ledgers import is_on_shapes, record_ledgers, step_ledger
from planner.ledger.ledger import Ledger
from planner.machine.hardware import Gpu, recognise_gpu
from planner.memory.allocator_config import AllocatorConfig
from planner.memory.profile import growth_within
from planner.recording import recordings
from planner.throughput.prediction import step_time
from planner.throughput.rates import DeviceRates, rates_for
from planner.throughput.result import Throughput
from planner.throughput.timeline import exchanges_of

FEW_BATCHES = 4
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
    Where only a parallelism is not modelled, one device's estimate stands for it. None for any
    other setting that is not (which can still be probed).
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
        self._shared: dict[Key, tuple[Estimate, Ledger] | UnsupportedError] = {}
        self._optimizers: dict[Key, tuple[float, int]] = {}

    def record(
        self, model: Model, settings: Iterable[TrainSetting], limit_seconds: float | None = None,
        say: Callable[[str], None] | None = None,
    ) -> str:  # fmt: skip
        """Records what estimates of `settings` rest on, where there is no step on shapes: each step
        at few batches (`few_batches`). Returns why not even one of them can be estimated, "" where
        one can.

        Only what was recorded here is estimated later: no estimate begins a recording.
        """
        wanted = self.steps_of(model, settings)
        requests = [(model, one, self.gpu) for one in wanted]
        errors = record_ledgers(requests, say, limit_seconds)
        if not wanted or any(self._is_known(model, one) for one in wanted):
            return ""
        return next((e.message for e in errors if e is not None), "no step was recorded in time")

    def steps_of(self, model: Model, settings: Iterable[TrainSetting]) -> list[ResolvedSetting]:
        """What is recorded for estimates of `settings`; none of what is on shapes."""
        ladders: dict[TrainSetting, list[TrainSetting]] = {}
        for setting in settings:
            ladders.setdefault(_any_batch(setting), []).append(self._as_it_runs(setting))
        steps: dict[ResolvedSetting, None] = {}
        bare: dict[ResolvedSetting, None] = {}
        for setting in (few for ladder in ladders.values() for few in few_batches(ladder)):
            for each in dict.fromkeys((setting, on_one_device(setting))):
                if is_on_shapes(model, each):
                    continue
                with suppress(UnsupportedError):
                    steps[resolve(model, self.shared_setting(each))[1]] = None
                    bare[resolve(model, _bare(each))[1]] = None
        return list({**steps, **bare})

    def __call__(self, model: Model, setting: TrainSetting) -> Estimate | None:
        as_it_runs = self._as_it_runs(setting)
        for stand_in in dict.fromkeys((as_it_runs, on_one_device(as_it_runs))):
            with suppress(UnsupportedError):
                return replace(self._call(model, stand_in), setting=setting)
        return None

    def _as_it_runs(self, setting: TrainSetting) -> TrainSetting:
        """On a CPU an offload moves nothing: its tensors are on the host already."""
        if self.device.kind != "cpu":
            return setting
        return setting.model_copy(update={"offload": "none", "offload_optimizer": "none"})

    def _call(self, model: Model, setting: TrainSetting) -> Estimate:
        shared = self.shared_setting(setting)
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

    def _is_known(self, model: Model, setting: ResolvedSetting) -> bool:
        return isinstance(recordings.find(recordings.step_of(model, setting, self.gpu)), Ledger)

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
            ledger, rates = self._ledger(*choose(model, at, self.gpu, {})), self._rates(model)
            phases = step_time(ledger, at, rates).phase_seconds if rates else {}
            seconds = phases.get("optimizer", 0.0)
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


SettingT = TypeVar("SettingT", bound=TrainSetting)


def few_batches(ladder: Sequence[SettingT]) -> list[SettingT]:
    """Settings that differ in their batch: those that are estimated, evenly from the smallest to
    the largest. A step is affine in its batch, and its peak the largest of such, so that on the
    lines between them no peak is below its estimate. A step of one image is unlike all others (its
    strides are)."""
    known = sorted(ladder, key=lambda setting: setting.batch_size)
    known = [setting for setting in known if setting.batch_size > 1] or known
    places = (round(n * (len(known) - 1) / (FEW_BATCHES - 1)) for n in range(FEW_BATCHES))
    return [known[place] for place in dict.fromkeys(places)]


def _any_batch(setting: TrainSetting) -> TrainSetting:
    return setting.model_copy(update={"batch_size": 1, "accumulate": 1})


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
