"""Estimates of a whole space of settings for the device at hand, made in seconds, since settings
that differ only in what hardly moves memory share one step. Imports no torch.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from planner.core.errors import UnsupportedError
from planner.core.schema import DeviceInfo, Model, ResolvedSetting, TrainSetting
from planner.core.schema.setting import GRAPH_MODES
from planner.estimation.arguments import Target
from planner.estimation.estimate import Estimate, estimate_ledger, read_resolved, resolve
from planner.estimation.ledgers import is_on_shapes, record_ledgers, step_ledger
from planner.ledger.ledger import Ledger
from planner.machine.hardware import Gpu, recognise_gpu
from planner.memory.allocator_config import AllocatorConfig
from planner.memory.profile import phase_growth
from planner.recording import recordings
from planner.throughput.prediction import step_time
from planner.throughput.rates import DeviceRates, rates_for
from planner.throughput.result import Throughput
from planner.throughput.timeline import find_exchanges

FEW_BATCHES = 4
Key = tuple[Model, TrainSetting]


class DeviceEstimator:
    """Estimates settings for `device` by the catalogue's rates; of a device that is not in the
    catalogue only the memory. `allocator` are the caching allocator's options that a probe will
    run with; None are torch's defaults.

    Whose memory stands for another setting's:

    - the eager step's for a compiled one, which needs at most as much unless it is checkpointed and
      compiled whole (torch's partitioner may then recompute all blocks at once, torch 2.13); with
      CUDA graphs it needs besides what the optimizer takes for its step, since the graphs' pool is
      not given back to it;
    - fp32's for tf32, and bf16's for fp16, which keeps as many bytes;
    - an optimizer in many kernels for the fused one, which needs less while it steps.

    The times are the shared step's, corrected for precision, compilation and the optimizer. One
    device's estimate stands for a parallelism that is not modelled. Any other setting that is not
    modelled has no estimate (None), and can still be probed.
    """

    def __init__(self, device: DeviceInfo, allocator: AllocatorConfig | None = None) -> None:
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
        """Records the steps that estimates of `settings` rest on, each at few batches, where there
        is no step on shapes. Returns why not even one of them can be estimated, "" where one can.

        Only what was recorded here is estimated later: no estimate begins a recording.
        """
        steps = self.steps_of(model, settings)
        errors = record_ledgers([(model, step, self.gpu) for step in steps], say, limit_seconds)
        if not steps or any(self._is_recorded(model, step) for step in steps):
            return ""
        return next((e.message for e in errors if e is not None), "no step was recorded in time")

    def steps_of(self, model: Model, settings: Iterable[TrainSetting]) -> list[ResolvedSetting]:
        """The steps that are recorded for estimates of `settings`; none that are on shapes."""
        ladders: dict[TrainSetting, list[TrainSetting]] = {}
        for setting in settings:
            ladders.setdefault(_without_batch(setting), []).append(self._as_it_runs(setting))
        steps: dict[ResolvedSetting, None] = {}
        optimizer_steps: dict[ResolvedSetting, None] = {}
        for setting in (rung for ladder in ladders.values() for rung in few_batches(ladder)):
            for candidate in dict.fromkeys((setting, setting.on_one_device())):
                if is_on_shapes(model, candidate):
                    continue
                with suppress(UnsupportedError):
                    steps[resolve(model, self.shared_setting(candidate))[1]] = None
                    optimizer_steps[resolve(model, _optimizer_step(candidate))[1]] = None
        return list({**steps, **optimizer_steps})

    def __call__(self, model: Model, setting: TrainSetting) -> Estimate | None:
        as_it_runs = self._as_it_runs(setting)
        for stand_in in dict.fromkeys((as_it_runs, as_it_runs.on_one_device())):
            with suppress(UnsupportedError):
                return replace(self._estimate(model, stand_in), setting=setting)
        return None

    def _as_it_runs(self, setting: TrainSetting) -> TrainSetting:
        """The setting as this device runs it: on a CPU an offload moves nothing, since its tensors
        are on the host already."""
        if self.device.kind != "cpu":
            return setting
        return setting.model_copy(update={"offload": "none", "offload_optimizer": "none"})

    def _estimate(self, model: Model, setting: TrainSetting) -> Estimate:
        shared = self.shared_setting(setting)
        if (model, shared) not in self._shared:
            self._shared[model, shared] = self._estimate_shared(model, shared)
        result = self._shared[model, shared]
        if isinstance(result, UnsupportedError):
            raise result
        estimate, ledger = result
        if shared == setting:
            return estimate
        if setting.compile in GRAPH_MODES:
            estimate = _add_beside_graphs(estimate, self._optimizer_cost(model, setting)[1])
        time = self._timed(model, setting, estimate, ledger)
        return replace(estimate, setting=setting, throughput=time)

    def shared_setting(self, setting: TrainSetting) -> TrainSetting:
        """The setting whose step stands for that of `setting`."""
        stands_for = {"tf32": "fp32"}
        if (self.device.capability or (0, 0)) >= (8, 0):
            stands_for["fp16"] = "bf16"
        changes = {"precision": stands_for.get(setting.precision, setting.precision)}
        if setting.optimizer_implementation != "8bit":
            changes["optimizer"] = setting.optimizer_family
        return setting.uncompiled().model_copy(update=changes)

    def _estimate_shared(
        self, model: Model, setting: TrainSetting
    ) -> tuple[Estimate, Ledger] | UnsupportedError:
        try:
            model, resolved = read_resolved(model, setting, self.gpu, {})
            ledger = self._ledger(model, resolved)
            target = Target(self.gpu, allocator=self.allocator)
            return estimate_ledger(model, resolved, ledger, target, self._rates(model)), ledger
        except UnsupportedError as error:
            return error

    def _is_recorded(self, model: Model, setting: ResolvedSetting) -> bool:
        return isinstance(recordings.find(recordings.step_of(model, setting, self.gpu)), Ledger)

    def _ledger(self, model: Model, setting: ResolvedSetting) -> Ledger:
        """Raises UnsupportedError for a step that would have to be recorded."""
        if not is_on_shapes(model, setting) and not self._is_recorded(model, setting):
            raise UnsupportedError(f"{model.title}'s step was not recorded", "Estimate it first.")
        return step_ledger(model, setting, gpu=self.gpu)

    def _timed(
        self, model: Model, setting: TrainSetting, shared: Estimate, ledger: Ledger
    ) -> Throughput | None:
        """The time of the shared step in the precision and the compile mode of `setting`, with the
        seconds of its optimizer's implementation; without the parts of which it is the sum."""
        rates = self._rates(model)
        if rates is None:
            return None
        plain = setting.model_copy(update={"optimizer": shared.setting.optimizer})
        time = step_time(ledger, plain, rates, find_exchanges(ledger, plain, self.gpu))
        seconds = time.step_seconds
        if plain != setting:
            own, other = (self._optimizer_cost(model, s)[0] for s in (setting, plain))
            seconds += time.phase_seconds.get("optimizer", 0.0) * (own / other - 1 if other else 0)
        images = setting.images_per_device_step
        return Throughput(seconds, images / seconds, time.basis, time.uncertainty)

    def _rates(self, model: Model) -> DeviceRates | None:
        return None if self.gpu is None else rates_for(self.gpu, model)

    def _optimizer_cost(self, model: Model, setting: TrainSetting) -> tuple[float, int]:
        """(seconds, bytes) that the optimizer takes for its step, whatever the batch. 0 seconds
        without rates."""
        step = _optimizer_step(setting)
        if (model, step) not in self._optimizers:
            ledger = self._ledger(*read_resolved(model, step, self.gpu, {}))
            rates = self._rates(model)
            phases = step_time(ledger, step, rates).phase_seconds if rates else {}
            seconds = phases.get("optimizer", 0.0)
            self._optimizers[model, step] = seconds, phase_growth(ledger, "optimizer")
        return self._optimizers[model, step]


def _optimizer_step(setting: TrainSetting) -> TrainSetting:
    """A small step with the optimizer of `setting`, to see only that: precision matters to an
    optimizer only where the parameters themselves are kept in it."""
    changes = {
        "batch_size": 2, "accumulate": 1, "checkpointing": "none",
        "precision": "fp32" if setting.precision != "pure-bf16" else setting.precision,
    }  # fmt: skip
    return setting.uncompiled().model_copy(update=changes)


SettingT = TypeVar("SettingT", bound=TrainSetting)


def few_batches(ladder: Sequence[SettingT]) -> list[SettingT]:
    """Of settings that differ only in their batch, those that are estimated: evenly from the
    smallest batch to the largest. The bytes of a step are affine in its batch and its peak is the
    largest of them, so that between two estimates no peak lies above the line through them. A
    batch of 1 is left out: its tensors have other strides."""
    rungs = sorted(ladder, key=lambda setting: setting.batch_size)
    rungs = [setting for setting in rungs if setting.batch_size > 1] or rungs
    places = (round(n * (len(rungs) - 1) / (FEW_BATCHES - 1)) for n in range(FEW_BATCHES))
    return [rungs[place] for place in dict.fromkeys(places)]


def _without_batch(setting: TrainSetting) -> TrainSetting:
    return setting.model_copy(update={"batch_size": 1, "accumulate": 1})


def _add_beside_graphs(estimate: Estimate, num_bytes: int) -> Estimate:
    """`estimate` with bytes that cannot come from the pool of its CUDA graphs."""
    temporaries = estimate.breakdown["temporaries"] + num_bytes
    return replace(
        estimate,
        breakdown={**estimate.breakdown, "temporaries": temporaries},
        peak_allocated_bytes=estimate.peak_allocated_bytes + num_bytes,
        peak_reserved_bytes=estimate.peak_reserved_bytes + num_bytes,
        device_total_bytes=estimate.device_total_bytes + num_bytes,
        low_bytes=estimate.low_bytes + num_bytes,
        high_bytes=estimate.high_bytes + num_bytes,
    )
