"""Estimates of a whole space of settings for the device at hand, made in seconds, since settings
that differ only in what hardly moves memory share one step; and the largest batch that fits.
Imports no torch.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

from planner.core.errors import UnsupportedError
from planner.core.schema import DeviceInfo, Model, ResolvedSetting, SwinConfig, TrainSetting
from planner.core.schema.model import MAX_SIZE
from planner.core.schema.setting import GRAPH_MODES
from planner.estimation.arguments import ModelLike, SettingLike, Target, read_target
from planner.estimation.estimate import Estimate, choose, estimate_ledger, read_choice, resolve
from planner.estimation.ledgers import is_on_shapes, record_ledgers, step_ledger
from planner.ledger.ledger import Ledger
from planner.libraries.limits import SDPA_WINDOWS, batch_multiple, largest_sdpa_batch
from planner.machine.hardware import Gpu, recognise_gpu
from planner.memory.allocator_config import AllocatorConfig
from planner.memory.profile import phase_growth
from planner.recording import recordings
from planner.throughput.prediction import step_time
from planner.throughput.rates import DeviceRates, rates_for
from planner.throughput.result import Throughput, TrainingLength
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
            config, chosen = choose(model, setting, self.gpu, {})
            ledger = self._ledger(config, chosen)
            target = Target(self.gpu, allocator=self.allocator)
            return estimate_ledger(config, chosen, ledger, target, self._rates(config)), ledger
        except UnsupportedError as error:
            return error

    def _is_recorded(self, model: Model, setting: ResolvedSetting) -> bool:
        return isinstance(recordings.find(recordings.step_of(model, setting, self.gpu)), Ledger)

    def _ledger(self, model: Model, setting: ResolvedSetting) -> Ledger:
        """Raises UnsupportedError for a step that would have to be recorded."""
        if not is_on_shapes(model, setting) and not self._is_recorded(model, setting):
            raise UnsupportedError(f"{model.title}'s step was not recorded")
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
        images = setting.batch_size * setting.accumulate
        return Throughput(seconds, images / seconds, time.basis, time.uncertainty)

    def _rates(self, model: Model) -> DeviceRates | None:
        return None if self.gpu is None else rates_for(self.gpu, model)

    def _optimizer_cost(self, model: Model, setting: TrainSetting) -> tuple[float, int]:
        """(seconds, bytes) that the optimizer takes for its step, whatever the batch. 0 seconds
        without rates."""
        step = _optimizer_step(setting)
        if (model, step) not in self._optimizers:
            ledger, rates = self._ledger(*choose(model, step, self.gpu, {})), self._rates(model)
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


def largest_batch(
    model: ModelLike,
    setting: SettingLike | None = None,
    gpu: str | Gpu | None = None,
    memory_bytes: int | str | None = None,
    ceiling: int = MAX_SIZE,
    allocator: str | AllocatorConfig | None = None,
    recorded: bool = False,
    link: str | None = None,
    surely: bool = False,
    **overrides: Any,
) -> Estimate | None:
    """The estimate at the largest batch found up to `ceiling` that fits while the next does not;
    None where none fits. With sdpa it is at most the batch that its kernel takes, with fp8 a
    multiple of 16. With `surely` even the upper end of its range fits. All else is as
    `planner.estimate` takes it.

    The live bytes rise with the batch; what the allocator keeps beside them goes up and down, so
    that a still larger batch may fit too. Raises UnsupportedError without a budget.
    """
    target = read_target(gpu, memory_bytes, allocator, link, recorded)
    config, chosen = read_choice(model, setting, target.gpu, overrides)
    return largest_that_fits(config, chosen, target, ceiling, surely)


def largest_that_fits(
    model: Model, setting: TrainSetting, target: Target, ceiling: int = MAX_SIZE,
    surely: bool = False,
) -> Estimate | None:  # fmt: skip
    """`largest_batch`, of arguments that were read."""
    if target.budget_bytes is None:
        raise UnsupportedError(
            "the largest batch needs a memory size to fit into.", "Add --gpu NAME or --memory SIZE."
        )
    unit = batch_multiple(setting)
    config, resolved = resolve(model, setting.model_copy(update={"batch_size": unit}))
    if resolved.attention == "sdpa" and isinstance(config, SwinConfig):
        ceiling = min(ceiling, largest_sdpa_batch(config, resolved) or ceiling)
    ceiling //= unit  # from here on batches count units

    @cache
    def estimate_at(batch: int) -> Estimate:
        chosen = resolved.model_copy(update={"batch_size": batch * unit})
        ledger = step_ledger(config, chosen, target.recorded, target.gpu)
        return estimate_ledger(config, chosen, ledger, target)

    def spare_bytes(batch: int) -> int:
        """What is left of the budget, with `surely` in the worst case; negative where the batch
        does not fit."""
        estimate = estimate_at(batch)
        need = estimate.high_bytes if surely else estimate.device_total_bytes
        spare = (estimate.budget_bytes or 0) - need
        return spare if estimate.fits else min(spare, -1)

    largest = 0
    if ceiling >= 2 and spare_bytes(2) >= 0:
        largest = find_crossing(spare_bytes, 2, 16, ceiling + 1)
    elif ceiling and runs_at_1(config, resolved, target) and spare_bytes(1) >= 0:
        largest = 1
    if not largest:
        return None
    estimate = estimate_at(largest)
    end = [f"batches above {ceiling * unit:,} are not looked at"] if largest == ceiling else []
    return replace(estimate, assumed=(*estimate.assumed, *end))


def describe_kind(setting: TrainSetting) -> str:
    """What tells the rows of --max-batch apart whose precision or checkpointing nobody chose."""
    return f"{setting.precision}, checkpointing {setting.checkpointing}"


@dataclass(frozen=True)
class Largest:
    """The largest batch of a setting: `best` fits by the figures, `sure` even at the upper end of
    its range; None where no batch does."""

    model: Model
    setting: ResolvedSetting
    best: Estimate | None
    sure: Estimate | None = None

    @property
    def batch_size(self) -> int:
        return self.best.setting.batch_size if self.best else 0

    @property
    def sizes(self) -> dict[str, int]:
        """The largest batches that surely and that probably fit; 0 where none does."""
        surely = self.sure.setting.batch_size if self.sure else 0
        return {"surely": surely, "probably": self.batch_size}

    def as_json(self) -> dict[str, Any]:
        """As `planner estimate --max-batch --json` prints it."""
        return {
            "precision": self.setting.precision,
            "checkpointing": self.setting.checkpointing,
            "largest_batch_size": self.batch_size,
            "estimate": self.best,
        }


def find_largest(
    model: Model, setting: ResolvedSetting, target: Target, length: TrainingLength | None
) -> Largest:
    """The largest batches that fit, with how long a training of that `length` takes."""
    sure = best = largest_that_fits(model, setting, target)
    if best and not best.fits_surely:
        sure = largest_that_fits(model, setting, target, best.setting.batch_size, surely=True)
    best, sure = (estimate and estimate.with_cost(length) for estimate in (best, sure))
    return Largest(model, setting, best, sure)


def largest_notes(rows: Sequence[Largest]) -> list[str]:
    """Which settings fit at no batch, and where sdpa's kernel takes no larger one."""
    notes = [_nothing_fits(row.setting) for row in rows if row.best is None]
    limits = [
        row.batch_size for row in rows
        if row.best and row.setting.attention == "sdpa" and isinstance(row.model, SwinConfig)
        and row.batch_size == largest_sdpa_batch(row.model, row.setting)
    ]  # fmt: skip
    if limits:
        notes.append(
            f"Batch {limits[0]} is all that sdpa takes, however much memory there is: its kernel "
            f"takes {SDPA_WINDOWS:,} windows. --attention eager takes more."
        )
    return notes


def _nothing_fits(setting: TrainSetting) -> str:
    ways = ["a smaller image or model"]
    if setting.checkpointing == "none":
        ways.insert(0, "--checkpointing blocks")
    if setting.precision in ("fp32", "tf32"):
        ways.insert(0, "--precision bf16")
    if setting.optimizer_family != "sgd":
        ways.append("--optimizer sgd")
    smallest = batch_multiple(setting)
    return f"Not even batch {smallest} fits with {describe_kind(setting)}. Try {', '.join(ways)}."


def runs_at_1(model: Model, setting: ResolvedSetting, target: Target) -> bool:
    """Whether the step runs at a batch of 1, at which batch norm over the batch alone fails."""
    at_1 = setting.model_copy(update={"batch_size": 1})
    return record_ledgers([(model, at_1, target.gpu)], recorded=target.recorded)[0] is None


def find_crossing(spare_bytes: Callable[[int], int], low: int, guess: int, end: int) -> int:
    """A number from `low` and below `end` at which `spare_bytes` is 0 or more, and at the next less
    than 0; it is 0 or more at `low`. Each guess lies where the line through the last two crosses
    0; every third halves the interval."""
    spare, high = {low: spare_bytes(low)}, end
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        spare[guess] = spare_bytes(guess)
        fall = spare[low] - spare[guess]
        crossing = low + spare[low] * (guess - low) // fall if fall > 0 else 4 * guess
        low, high = (guess, high) if spare[guess] >= 0 else (low, guess)
        is_bounded = high < end and len(spare) % 3 == 0
        guess = (low + high) // 2 if is_bounded else crossing
    return low
