"""Estimates of a whole space of settings for the device at hand, in seconds: settings that differ
only in what hardly moves memory share one recorded step. And the largest batch that fits.
Imports no torch.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any, TypeVar

from planner.core.errors import UnsupportedError
from planner.core.schema import DeviceInfo, Model, ResolvedSetting, SwinConfig, TrainSetting
from planner.core.schema.model import MAX_SIZE
from planner.core.schema.setting import GRAPH_MODES
from planner.estimation.arguments import (
    ModelLike,
    SettingLike,
    read_allocator,
    read_gpu,
    read_memory,
)
from planner.estimation.estimate import Estimate, choose, estimate_ledger, read_choice, resolve
from planner.estimation.ledgers import is_on_shapes, record_ledgers, step_ledger
from planner.ledger.ledger import Ledger
from planner.libraries.limits import SDPA_WINDOWS, batch_unit, largest_sdpa_batch
from planner.machine.hardware import Gpu, recognise_gpu
from planner.memory.allocator_config import AllocatorConfig
from planner.memory.profile import growth_within
from planner.recording import recordings
from planner.throughput.prediction import step_time
from planner.throughput.rates import DeviceRates, rates_for
from planner.throughput.result import Throughput, Training
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
            for each in dict.fromkeys((setting, setting.on_one_device())):
                if is_on_shapes(model, each):
                    continue
                with suppress(UnsupportedError):
                    steps[resolve(model, self.shared_setting(each))[1]] = None
                    bare[resolve(model, _bare(each))[1]] = None
        return list({**steps, **bare})

    def __call__(self, model: Model, setting: TrainSetting) -> Estimate | None:
        as_it_runs = self._as_it_runs(setting)
        for stand_in in dict.fromkeys((as_it_runs, as_it_runs.on_one_device())):
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
    temporaries = found.breakdown["temporaries"] + more
    return replace(
        found,
        breakdown={**found.breakdown, "temporaries": temporaries},
        peak_allocated_bytes=found.peak_allocated_bytes + more,
        peak_reserved_bytes=found.peak_reserved_bytes + more,
        device_total_bytes=found.device_total_bytes + more,
        low_bytes=found.low_bytes + more,
        high_bytes=found.high_bytes + more,
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
    """The estimate at a batch up to `ceiling` that fits, of which the next does not, or None where
    none does; with sdpa no larger one than its kernel takes, with fp8 only multiples of 16.
    `allocator` None means torch's defaults; all else is as `planner.estimate` takes it. With
    `surely` it is one of which even the upper end of what is expected fits.

    What is live rises with the batch; what the allocator keeps beside it goes up and down, so that
    a larger batch may fit, too. Raises UnsupportedError without a budget.
    """
    device, memory, allocator = read_gpu(gpu), read_memory(memory_bytes), read_allocator(allocator)
    if device is None and memory is None:
        raise UnsupportedError(
            "the largest batch needs a memory size to fit into.", "Add --gpu NAME or --memory SIZE."
        )
    config, wanted = read_choice(model, setting, device, overrides)
    unit = batch_unit(wanted)
    config, resolved = resolve(config, wanted.model_copy(update={"batch_size": unit}))
    if resolved.attention == "sdpa" and isinstance(config, SwinConfig):
        ceiling = min(ceiling, largest_sdpa_batch(config, resolved) or ceiling)
    ceiling //= unit  # from here on batches count units

    @lru_cache(maxsize=2)
    def ledger_at(batch: int) -> Ledger:
        return step_ledger(config, setting_at(batch), recorded, device)

    def setting_at(batch: int) -> ResolvedSetting:
        return resolved.model_copy(update={"batch_size": batch * unit})

    @cache
    def at(batch: int) -> Estimate:
        return estimate_ledger(
            config, setting_at(batch), ledger_at(batch), device, memory, allocator, link=link
        )

    def spare_bytes(batch: int) -> int:
        """What is left of the budget, in the worst case with `surely`; less than 0 where it does
        not fit."""
        found = at(batch)
        need = found.high_bytes if surely else found.device_total_bytes
        spare = (found.budget_bytes or 0) - need
        return spare if found.fits else min(spare, -1)

    found = 0
    if ceiling >= 2 and spare_bytes(2) >= 0:
        found = sought(spare_bytes, 2, 16, ceiling + 1)
    elif ceiling and runs_at_1(config, resolved, recorded, device) and spare_bytes(1) >= 0:
        found = 1
    if not found:
        return None
    ended = [f"batches above {ceiling * unit:,} are not looked at"] if found == ceiling else []
    return replace(at(found), assumed=(*at(found).assumed, *ended))


def kind_of(setting: TrainSetting) -> str:
    """What tells the rows of a table apart that nobody chose."""
    return f"{setting.precision}, checkpointing {setting.checkpointing}"


@dataclass(frozen=True)
class Largest:
    """The largest batch of a setting: `sure` surely fits, `best` does by the figures, None where
    none does."""

    model: Model
    setting: ResolvedSetting
    best: Estimate | None
    sure: Estimate | None = None

    @property
    def batch_size(self) -> int:
        return self.best.setting.batch_size if self.best else 0

    @property
    def sizes(self) -> dict[str, int]:
        """One that surely fits (0: none), and the largest that does by the figures."""
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
    model: Model, setting: ResolvedSetting, gpu: Gpu | None, memory_bytes: int | None,
    allocator: AllocatorConfig | None, recorded: bool, link: str | None, training: Training | None,
) -> Largest:  # fmt: skip
    """The largest batches that fit, with how long a whole training takes."""
    find = partial(
        largest_batch, model, setting, gpu, memory_bytes, allocator=allocator, recorded=recorded,
        link=link,
    )  # fmt: skip
    sure = best = find()
    if best and not best.fits_surely:
        sure = find(ceiling=best.setting.batch_size, surely=True)
    best, sure = (one and one.with_cost(training) for one in (best, sure))
    return Largest(model, setting, best, sure)


def largest_notes(found: Sequence[Largest]) -> list[str]:
    """What is to be said of them: what fits nowhere, and what a larger batch would take."""
    notes = [_nothing_fits(one) for one in found if one.best is None]
    bound = [
        one.batch_size for one in found
        if one.best and one.setting.attention == "sdpa" and isinstance(one.model, SwinConfig)
        and one.batch_size == largest_sdpa_batch(one.model, one.setting)
    ]  # fmt: skip
    if bound:
        notes.append(
            f"Batch {bound[0]} is all that sdpa takes, however much memory there is: its kernel "
            f"takes {SDPA_WINDOWS:,} windows. --attention eager takes more."
        )
    return notes


def _nothing_fits(one: Largest) -> str:
    setting = one.setting
    ways = ["a smaller image or model"]
    if setting.checkpointing == "none":
        ways.insert(0, "--checkpointing blocks")
    if setting.precision in ("fp32", "tf32"):
        ways.insert(0, "--precision bf16")
    if setting.optimizer_family != "sgd":
        ways.append("--optimizer sgd")
    least = f"batch {batch_unit(setting)} fits"
    return f"Not even {least} with {kind_of(setting)}. Try {', '.join(ways)}."


def runs_at_1(
    model: Model, setting: ResolvedSetting, recorded: bool = False, gpu: Gpu | None = None
) -> bool:
    """Whether the step runs at a batch of 1: batch norm over nothing but the batch does not."""
    at_1 = ResolvedSetting(setting.model_copy(update={"batch_size": 1}))
    return record_ledgers([(model, at_1, gpu)], recorded=recorded)[0] is None


def sought(spare_bytes: Callable[[int], int], low: int, guess: int, end: int) -> int:
    """The last number from `low`, which leaves 0 or more, and below `end` that does, of which the
    next leaves less: time after time where a line crosses 0, or halfway."""
    known, high = {low: spare_bytes(low)}, end
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        known[guess] = spare_bytes(guess)
        fall = known[low] - known[guess]
        crossing = low + known[low] * (guess - low) // fall if fall > 0 else 4 * guess
        low, high = (guess, high) if known[guess] >= 0 else (low, guess)
        is_bounded = high < end and len(known) % 3 == 0
        guess = (low + high) // 2 if is_bounded else crossing
    return low
