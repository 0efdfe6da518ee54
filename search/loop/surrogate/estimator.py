"""The planner's estimate for a whole space of settings, in seconds: settings that differ only in
what hardly moves memory share one recorded step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from planner.core.errors import PlannerError, UnsupportedError
from planner.core.schema import DeviceInfo, Model, ResolvedSetting, TrainSetting
from planner.core.schema.distribution import ALONE
from planner.core.schema.setting import GRAPH_MODES
from planner.estimation.estimate import Estimate, choose, estimate_ledger, resolve
from planner.estimation.ledgers import is_on_shapes, record_ledgers, step_ledger
from planner.ledger.affine import AffineLedger
from planner.ledger.ledger import Ledger
from planner.machine.hardware import Gpu, recognise_gpu
from planner.memory.allocator_config import AllocatorConfig
from planner.memory.profile import growth_within
from planner.throughput.communication import Exchanges
from planner.throughput.fusing import Operation
from planner.throughput.prediction import DeviceRates, StepTime, best_rates, predict_step
from planner.throughput.result import Throughput, exchanges_of
from planner.trace.kept_step import TracedStep, traced_step

Key = tuple[Model, TrainSetting]


class DeviceEstimator:
    """Estimates settings for `device`, by the `rates` measured on it or those of the catalogue.

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
        rates: DeviceRates | None = None,
        allocator: AllocatorConfig | None = None,
    ) -> None:
        self.device = device
        self.allocator = allocator
        cuda = device.kind == "cuda"
        self.gpu: Gpu | None = recognise_gpu(device.name, device.total_bytes) if cuda else None
        self.measured = rates
        # (parallelism, checkpointing) for which one device's estimate stands, and with their own.
        self.stood_in: set[tuple[str, str]] = set()
        self.estimated: set[tuple[str, str]] = set()
        self._shared: dict[Key, Estimate | UnsupportedError] = {}
        self._operations: dict[Key, tuple[list[Operation], Exchanges | None]] = {}
        self._steps: dict[Key, StepTime] = {}
        self._optimizers: dict[Key, int] = {}

    def record(
        self, model: Model, settings: Iterable[TrainSetting], limit_seconds: float | None = None,
        say: Callable[[str], None] | None = None,
    ) -> str:  # fmt: skip
        """Traces what estimates of `settings` rest on, where there is no step on shapes: all
        in one other process. Returns why not even one of them can be estimated, "" where one can.

        Only what was recorded here is estimated later: no estimate begins a trace.
        """
        settings = [self._as_it_runs(setting) for setting in settings]
        settings = list(dict.fromkeys(s for each in settings for s in (each, on_one_device(each))))
        traced = [setting for setting in settings if not is_on_shapes(model, setting)]
        if settings and not traced:
            return ""
        steps: dict[int, tuple[TracedStep, ResolvedSetting]] = {}
        for setting in sorted(traced, key=lambda s: (s.batch_size == 1, s.batch_size)):
            for recorded in self._recorded(setting):
                with suppress(UnsupportedError):
                    resolved = resolve(model, recorded)[1]
                    if is_on_shapes(model, resolved):  # only one to compare with
                        continue
                    step = traced_step(model, resolved)
                    steps.setdefault(id(step), (step, resolved))
        record_ledgers([(model, r) for _, r in steps.values()], say, limit_seconds)
        faults = [_fault(step, r.batch_size) for step, r in steps.values()]
        if len(traced) < len(settings) or not all(faults):
            return ""
        return faults[0] if faults else "none of its settings can be traced"

    def _recorded(self, setting: TrainSetting) -> Iterator[TrainSetting]:
        """The settings whose recorded steps an estimate of `setting` needs."""
        shared = self.shared_setting(setting)
        yield shared
        if (self.measured or self.gpu) and shared != setting:
            yield shared.model_copy(update={"accumulate": 1})
        if setting.optimizer != shared.optimizer or setting.compile in GRAPH_MODES:
            yield _bare(shared)
            yield _bare(setting)

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
        if (model, shared) not in self._shared:
            self._shared[model, shared] = self._estimate(model, shared)
        found = self._shared[model, shared]
        if isinstance(found, UnsupportedError):
            raise found
        if shared == setting:
            return found
        if setting.compile in GRAPH_MODES:
            found = _beside_a_pool(found, self._optimizer_bytes(model, setting))
        return replace(found, setting=setting, throughput=self._timed(model, setting, found))

    def shared_setting(self, setting: TrainSetting) -> TrainSetting:
        """The setting whose recorded step stands for that of `setting`."""
        alike = {"tf32": "fp32"}
        if (self.device.capability or (0, 0)) >= (8, 0):
            alike["fp16"] = "bf16"
        changes = {
            "precision": alike.get(setting.precision, setting.precision),
        }
        if setting.optimizer_implementation != "8bit":
            changes["optimizer"] = setting.optimizer_family
        return setting.uncompiled().model_copy(update=changes)

    def _estimate(self, model: Model, setting: TrainSetting) -> Estimate | UnsupportedError:
        try:
            config, chosen = choose(model, setting, self.gpu, {})
            ledger = self._ledger(config, chosen)
            rates = self._rates(config)
            return estimate_ledger(
                config, chosen, ledger, self.gpu, allocator=self.allocator, rates=rates
            )
        except UnsupportedError as error:
            return error

    def _ledger(self, model: Model, setting: ResolvedSetting) -> Ledger:
        """The recorded step. Raises UnsupportedError where a trace is needed and was not made."""
        if not is_on_shapes(model, setting):
            fault = _fault(traced_step(model, setting), setting.batch_size)
            if fault:
                raise UnsupportedError(fault)
        return step_ledger(model, setting)

    def _timed(self, model: Model, setting: TrainSetting, found: Estimate) -> Throughput | None:
        """The shared step's time made that of `setting`: its micro-batches by precision and
        compilation, its optimizer's step by the implementation, and its wait for other devices by
        what the last micro-batch waits more. Only the whole step is known: what the shared one's
        seconds go into is not said of it."""
        rates = self._rates(model)
        if rates is None or found.throughput is None:
            return None
        plain = setting.model_copy(update={"optimizer": found.setting.optimizer})
        here, there = self._step(model, plain), self._step(model, found.setting)
        waited = _waited_seconds(found.throughput)
        micro_batches = found.throughput.step_seconds - waited - _optimizer_seconds(there)
        seconds = micro_batches * _micro_batch_seconds(here) / _micro_batch_seconds(there)
        seconds += waited + _waited_seconds(here) - _waited_seconds(there)
        seconds += _optimizer_seconds(here) * self._optimizer_ratio(model, setting, plain)
        images = setting.batch_size * setting.accumulate
        uncertainty = rates.uncertainty_of(setting, here.kind_seconds)
        return Throughput(seconds, images / seconds, found.throughput.basis, uncertainty)

    def _rates(self, model: Model) -> DeviceRates | None:
        """Surer of a Swin than of another model, where they are the catalogue's."""
        return best_rates(self.gpu, model, self.measured)

    def _optimizer_ratio(self, model: Model, setting: TrainSetting, plain: TrainSetting) -> float:
        """How long the optimizer of `setting` steps, to that of `plain`: at a small batch, since
        only what is trained has to do with it."""
        if setting.optimizer == plain.optimizer:
            return 1.0
        own, other = (_optimizer_seconds(self._step(model, _bare(s))) for s in (setting, plain))
        return own / other if other else 1.0

    def _optimizer_bytes(self, model: Model, setting: TrainSetting) -> int:
        """What the optimizer takes within its step: at a small batch, with which it has nothing
        to do."""
        at = _bare(setting)
        if (model, at) not in self._optimizers:
            ledger = self._ledger(*choose(model, at, self.gpu, {}))
            self._optimizers[model, at] = growth_within(ledger, "optimizer")
        return self._optimizers[model, at]

    def _step(self, model: Model, setting: TrainSetting) -> StepTime:
        """The predicted time of one micro-batch and the optimizer's step, run as `setting` says."""
        at = setting.model_copy(update={"accumulate": 1})
        if (model, at) not in self._steps:
            rates = self._rates(model)
            assert rates is not None
            recorded = self.shared_setting(at).model_copy(update={"optimizer": at.optimizer})
            if (model, recorded) not in self._operations:
                ledger = self._ledger(*resolve(model, recorded))
                exchanges = exchanges_of(ledger, recorded, self.gpu)
                self._operations[model, recorded] = list(ledger.operations()), exchanges
            operations, exchanges = self._operations[model, recorded]
            self._steps[model, at] = predict_step(operations, rates, at, None, exchanges)
        return self._steps[model, at]


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


def _fault(step: TracedStep, batch_size: int) -> str:
    """Why a traced step gives no ledger at a batch, nor at any larger one; "" where it does."""
    if step.reason:
        return step.reason
    answer = step.answer(batch_size)
    if isinstance(answer, PlannerError):
        return answer.message
    return "" if isinstance(answer, AffineLedger | Ledger) else "it was not traced"


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


def _optimizer_seconds(step: StepTime) -> float:
    return step.phase_seconds.get("optimizer", 0.0)


def _micro_batch_seconds(step: StepTime) -> float:
    return step.step_seconds - _optimizer_seconds(step) - _waited_seconds(step)


def _waited_seconds(step: StepTime | Throughput) -> float:
    """What a device waits for others."""
    return 0.0 if step.communication is None else step.communication.exposed_seconds
