"""Model + setting + GPU -> Estimate. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from planner.core.schema import Model, ResolvedSetting, SwinConfig, TrainSetting
from planner.core.schema.model import FactoryModel, unit_of
from planner.core.schema.setting import OWN_OPTIMIZER
from planner.core.torch_version import installed_torch, why_untried
from planner.core.units import format_bytes
from planner.estimation.arguments import (
    ModelLike,
    SettingLike,
    allocator_here,
    check_fields,
    read_gpu,
    read_memory,
    read_model,
    read_setting,
)
from planner.estimation.ledgers import FusedAttention, fused_attention, left_out, step_ledger
from planner.ledger.ledger import CATEGORIES, IN_BACKWARD, Ledger
from planner.libraries.limits import attention_limit, setting_limit
from planner.libraries.names import find_library
from planner.machine.hardware.gpu import Gpu, check_precision, peak_flops
from planner.machine.hardware.overheads import (
    Communication,
    Overheads,
    communication_memory,
    overheads_for,
    was_emulated,
)
from planner.machine.torch_build import lacking_kernels
from planner.memory.allocator_config import AllocatorConfig, options_text
from planner.memory.compiled import (
    BOUNDED,
    RECORDED,
    Basis,
    basis_of,
    left_out_of,
    may_recompute_at_once,
    untuned,
)
from planner.memory.profile import (
    Instant,
    MemoryProfile,
    SteadyStep,
    profile_memory,
    profile_within,
    steady_step,
)
from planner.memory.scratch import (
    PATCH_EMBEDDING,
    Pinned,
    convolution_workspace,
    leaving_bytes,
    on_device,
    pinned_by_optimizer,
    pinned_memory,
)
from planner.throughput.prediction import step_time
from planner.throughput.rates import DeviceRates, rates_for
from planner.throughput.result import Cost, Throughput, Training, cost_of, read_training
from planner.throughput.timeline import communication_basis, exchanges_of


@dataclass(frozen=True)
class Estimate:
    """A ledger judged. All sizes in bytes; `breakdown` is what is live at the peak instant.

    Where `num_alloc_retries` is not 0, the step fits only since the allocator frees cached memory
    so often before steps recur; what is reserved is what it reserves then, and `high_bytes` is
    still of what it would reserve if there were more. `as_eager`: the step is compiled and not
    recorded, so that the bytes are the eager step's and only `low_bytes` and `high_bytes` say
    what it needs. `cost` is of a whole training, where one was asked for. `gpu` is a name of
    the catalogue, None where none was named; `allocator` are the caching allocator's options, None
    for torch's. `unit` is what an item of the batch is called, and `is_task` whether a task of
    one's own makes it: else images go in and logits come out.
    """

    model: Model
    setting: TrainSetting
    num_parameters: int
    breakdown: dict[str, int]
    saved_activation_bytes: int
    peak_live_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_total_bytes: int
    peak_at: str
    budget_bytes: int | None
    low_bytes: int
    high_bytes: int
    assumed: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    throughput: Throughput | None = None
    live_bytes: dict[str, int] = field(default_factory=dict)
    largest_at_peak: tuple[tuple[str, str, int], ...] = ()
    pinned_host_bytes: int = 0
    num_alloc_retries: int = 0
    as_eager: bool = False
    cost: Cost | None = None
    gpu: str | None = None
    allocator: str | None = None
    unit: str = "images"
    is_task: bool = False

    @property
    def headroom_bytes(self) -> int | None:
        """What the budget has beyond the need; None where none was named."""
        return None if self.budget_bytes is None else self.budget_bytes - self.device_total_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the budget is enough; None where none was named."""
        return None if self.headroom_bytes is None else self.headroom_bytes >= 0

    @property
    def fits_surely(self) -> bool | None:
        """Whether even the upper end of what is expected fits; None where nothing was named."""
        if self.budget_bytes is None:
            return None
        return max(self.device_total_bytes, self.high_bytes) <= self.budget_bytes

    def with_cost(self, training: Training | None) -> Estimate:
        """The same, with how long a whole training takes, where that is asked."""
        return replace(self, cost=cost_of(training, self.throughput))

    def as_json(self) -> dict[str, Any]:
        """The object that `planner estimate --json` prints: sizes are integers in bytes."""
        verdict = {n: getattr(self, n) for n in ("fits", "fits_surely", "headroom_bytes")}
        found = {**vars(self), "parameters": self.num_parameters, **verdict}
        ends = {name: found.pop(name) for name in ("low_bytes", "high_bytes")}
        names = ("path", "operation", "bytes")
        largest = [dict(zip(names, one, strict=True)) for one in self.largest_at_peak]
        del found["num_parameters"]
        return {**found, "largest_at_peak": largest, "uncertainty": ends}


def estimate(
    model: ModelLike,
    setting: SettingLike | None = None,
    *,
    gpu: str | Gpu | None = None,
    memory_bytes: int | str | None = None,
    allocator: str | AllocatorConfig | None = None,
    recorded: bool = False,
    link: str | None = None,
    epochs: float | None = None,
    images_per_epoch: int | None = None,
    **overrides: Any,
) -> Estimate:
    """The memory and time of one training step, without running it.

    `model` is `LIBRARY:NAME`, `package.module:factory`, a configuration file, a `SwinConfig` or its
    fields. A Swin of ours is estimated on shapes or, with `recorded`, by torch's own code on an
    emulated GPU, as every other model is: that needs torch once, and is kept. `setting` defaults to
    batch 64, bf16 autocast (fp16 where `gpu` has no bf16), adamw. `overrides` are fields of either;
    a `world_size` without a `parallelism` runs ddp.
    The budget is `memory_bytes` (or a text as 24GiB), else the GPU's memory, else none and `fits`
    is None. `allocator` are the caching allocator's options; None are those that torch would find
    in this environment. `link` is what joins several GPUs, as `planner estimate --link` takes it.
    With `epochs`, of `images_per_epoch` (None: ImageNet-1k's), the estimate has a `cost`: how long
    a whole training on `gpu` takes.
    Raises UsageError for what is unknown, UnsupportedError for what the library cannot do.
    """
    device, memory, allocator = read_gpu(gpu), read_memory(memory_bytes), allocator_here(allocator)
    training = read_training(epochs, images_per_epoch, device)
    config, chosen = choose(model, setting, device, overrides)
    ledger = step_ledger(config, chosen, recorded, device)
    found = estimate_ledger(
        config, chosen, ledger, device, memory, allocator, link=link, retries=True
    )
    return found.with_cost(training)


def choose(
    model: ModelLike, setting: SettingLike | None, gpu: Gpu | None, overrides: Mapping[str, Any]
) -> tuple[Model, ResolvedSetting]:
    """The architecture and the setting meant, the setting resolved for the model's library."""
    return resolve(*read_choice(model, setting, gpu, overrides))


def read_choice(
    model: ModelLike, setting: SettingLike | None, gpu: Gpu | None, overrides: Mapping[str, Any]
) -> tuple[Model, TrainSetting]:
    """The architecture and the setting meant, as they were given."""
    check_fields(overrides)
    of_setting = {k: v for k, v in overrides.items() if k in TrainSetting.model_fields}
    of_model = {k: v for k, v in overrides.items() if k not in of_setting}
    chosen = read_setting(setting, {"precision": default_precision(gpu)}, of_setting)
    check_precision(gpu, chosen.precision)
    return read_model(model, of_model), chosen


def resolve(model: Model, setting: TrainSetting) -> tuple[Model, ResolvedSetting]:
    """The setting as the model's library will run it; that of any other model stays as it is.

    Raises UsageError and UnsupportedError.
    """
    if not isinstance(model, SwinConfig):
        fault = setting_limit(setting) or attention_limit(model, setting)
        if fault is not None:
            raise fault.error()
        return model, ResolvedSetting(setting.with_recipe(of_swin=False))
    return model, find_library(model.library).resolve(model, setting)


def default_precision(gpu: Gpu | None) -> str:
    """bf16, or fp16 where the device has no bf16."""
    return "fp16" if gpu is not None and not gpu.has_bf16 else "bf16"


def estimate_ledger(
    config: Model,
    setting: TrainSetting,
    ledger: Ledger,
    gpu: Gpu | None = None,
    memory_bytes: int | None = None,
    allocator: AllocatorConfig | None = None,
    rates: DeviceRates | None = None,
    link: str | None = None,
    retries: bool = False,
    time: Throughput | None = None,
) -> Estimate:
    """What a ledger means on a device: totals, verdict, range, and what they rest on.

    `allocator` None means torch's defaults. Time is predicted by `rates`, or by those of the
    catalogue's `gpu`; what several devices exchange, by `link` (None: what `gpu` usually has).
    `time` is what these say of the step, where it is known already.
    With `retries` a step fits, too, that runs only where the allocator frees cached memory.
    """
    outside = overheads_for(gpu, ledger.environment, is_known=was_emulated(config, setting))
    communication = communication_memory(setting)
    ledger = on_device(ledger, outside.processors)
    beside = outside.context_bytes + communication.num_bytes
    budget = memory_bytes if memory_bytes is not None else gpu.memory_bytes if gpu else None
    plain = profile_memory(ledger, outside.workspace_bytes, allocator)
    lacking = 0 if budget is None else plain.peak_reserved_bytes + beside - budget
    within = None
    if retries and budget is not None and lacking > 0:
        within = profile_within(ledger, outside.workspace_bytes, allocator, budget - beside)
    memory = within or plain
    live, peak, reserved = memory.live, memory.peak, memory.peak_reserved_bytes
    total = reserved + beside
    convolutions, kernels = PATCH_EMBEDDING, set[FusedAttention]()
    if not isinstance(config, SwinConfig):
        convolutions, kernels = convolution_workspace(ledger), fused_attention(ledger)
    capability = gpu.capability if gpu else None
    basis = _basis(config, setting, ledger, outside)
    low, high = _range(config, setting, basis, live, (reserved, plain.peak_reserved_bytes), ledger)
    if rates is None and gpu is not None:
        rates = rates_for(gpu, config)
    exchanges = None if rates is None else exchanges_of(ledger, setting, gpu, link)
    if time is None and rates is not None:
        time = step_time(ledger, setting, rates, exchanges)
    pinned = pinned_memory(ledger) if setting.offload != "none" else Pinned()
    if ledger.own_optimizer:
        setting = setting.model_copy(update={"optimizer": OWN_OPTIMIZER})
    return Estimate(
        model=config,
        setting=setting,
        num_parameters=ledger.num_parameters,
        breakdown=_breakdown(memory, outside, communication),
        saved_activation_bytes=live.saved_bytes + ledger.pooled_saved_bytes,
        peak_live_bytes=live.peak_bytes,
        peak_allocated_bytes=memory.peak_allocated_bytes,
        peak_reserved_bytes=reserved,
        device_total_bytes=total,
        peak_at=describe_instant(peak, setting),
        budget_bytes=budget,
        low_bytes=low + outside.context_low_bytes + communication.low_bytes,
        high_bytes=(
            high + outside.context_high_bytes + communication.high_bytes + convolutions.high_bytes
        ),
        assumed=(
            *_torch_here(gpu),
            *outside.basis,
            *communication.basis,
            _allocator_basis(allocator),
            *([] if within is None else [_retries_basis(within, lacking)]),
            *_pinned_basis(pinned, setting),
            *ledger.notes,
            *basis.notes,
            *untuned(setting),
            *communication_basis(exchanges, setting),
        ),
        left_out=(
            *left_out(setting, convolutions, kernels, capability, ledger.is_recorded),
            *left_out_of(basis, setting),
            *([] if time is None else [f"of the time: {', '.join(time.left_out)}"]),
        ),
        throughput=time and _of_peak(time, gpu, setting),
        live_bytes=_phase_live_bytes(live),
        largest_at_peak=peak.largest,
        pinned_host_bytes=pinned.pinned_bytes + pinned_by_optimizer(ledger).pinned_bytes,
        num_alloc_retries=0 if within is None else within.num_alloc_retries,
        as_eager=setting.compile != "off" and basis is not RECORDED,
        gpu=gpu.name if gpu else None,
        allocator=(allocator and options_text(allocator)) or None,
        unit=ledger.unit or unit_of(config),
        is_task=isinstance(config, FactoryModel) and bool(ledger.unit),
    )


def _torch_here(gpu: Gpu | None) -> Iterator[str]:
    if said := why_untried(installed_torch()):
        yield f"torch allocates as it did before: {said}"
    if gpu is not None and (said := lacking_kernels(gpu.capability)):
        yield f"a torch that runs on this card: {said}"


def _basis(config: Model, setting: TrainSetting, ledger: Ledger, outside: Overheads) -> Basis:
    if setting.compile != "off":
        return basis_of(setting, ledger)
    return Basis(1 - outside.reserved_error, 1 + outside.reserved_error)


def _breakdown(
    memory: MemoryProfile, outside: Overheads, communication: Communication
) -> dict[str, int]:
    """Bytes at the peak instant by category, and what comes on top of live bytes."""
    breakdown: dict[str, int] = {c: memory.peak.by_category.get(c, 0) for c in CATEGORIES}
    workspace = outside.num_workspaces * outside.workspace_bytes + memory.workspace_bytes
    beside = memory.peak_reserved_bytes - memory.live.peak_bytes - workspace
    several = communication.num_bytes > 0
    return breakdown | {
        "workspace": workspace,
        "allocator_overhead": beside,
        "cuda_context": outside.context_bytes,
        **({"communication": communication.num_bytes} if several else {}),
    }


def _range(
    config: Model,
    setting: TrainSetting,
    basis: Basis,
    live: SteadyStep,
    reserved: tuple[int, int],
    ledger: Ledger,
) -> tuple[int, int]:
    """Between these the reserved bytes are expected to lie: around those of the device, and those
    of one that has memory enough.

    Where the eager step stands for a compiled one, its checkpointing may come to nothing
    (`may_recompute_at_once`). Below an activation memory budget of 1 it may save as much less.
    """
    least, most = reserved[0] - ledger.doubtful_bytes, reserved[1] + ledger.late_bytes
    if setting.offload_optimizer == "state-and-gradients":
        most += leaving_bytes(ledger)
    if basis is BOUNDED:
        least -= int((1 - setting.activation_memory_budget) * live.saved_bytes)
    at_once = basis is BOUNDED and may_recompute_at_once(setting)
    if at_once and isinstance(config, SwinConfig):
        unchecked = setting.model_copy(update={"checkpointing": "none"})
        whole = step_ledger(config, find_library(config.library).resolve(config, unchecked))
        most += steady_step(whole).saved_bytes - live.saved_bytes
    return int(least * basis.low), int(most * basis.high)


def _allocator_basis(config: AllocatorConfig | None) -> str:
    how = "its default settings" if config is None else config.source or "the options given"
    return f"the caching allocator with {how}"


def _retries_basis(within: MemoryProfile, lacking: int) -> str:
    if within.retries_each_step:
        how = f"{_times(within.retries_each_step)} a step, which is slower"
    else:
        how = f"{_times(within.num_alloc_retries)} in its first steps, which are slower"
    return (
        f"runs only by freeing cached memory {how}: {format_bytes(lacking)} more would let it run "
        "without"
    )


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _pinned_basis(pinned: Pinned, setting: TrainSetting) -> Iterator[str]:
    if setting.offload_optimizer != "none":
        yield (
            "torchao's CPUOffloadOptimizer: weights of 4096 elements or more are updated by the "
            "host's processor; their optimizer's state, and a copy of weight and gradient in "
            "pinned memory, are on the host"
        )
    if setting.offload_optimizer == "state-and-gradients":
        yield (
            "gradients are freed as backward goes, but their memory is used again only once they "
            "are on the host: where memory is plentiful torch may reserve up to all of theirs more"
        )
    if not pinned.num_bytes:
        return
    yield from (
        f"{format_bytes(pinned.num_bytes)} of saved activations are on the host when forward ends, "
        f"in {format_bytes(pinned.pinned_bytes)} of pinned memory: torch rounds each block up to a "
        "power of two, and pins more where the host runs ahead of the device",
        "copies to the host and back run on the stream that computes, which waits for them",
    )


def _of_peak(time: Throughput, gpu: Gpu | None, setting: TrainSetting) -> Throughput:
    """`time` with the share of the GPU's peak that its arithmetic is, where that has one."""
    peak = None if gpu is None else peak_flops(gpu, setting.precision)
    share = None if peak is None else time.matrix_flops / time.step_seconds / peak
    return replace(time, peak_share=share)


def _phase_live_bytes(live: SteadyStep) -> dict[str, int]:
    """Live bytes at the end of each phase of the steady step (of its last micro-batch)."""
    ends = {"before_step": live.before_step}
    for phase, num_bytes in live.ends:
        ends[f"after_{phase}"] = num_bytes
    return ends


def describe_instant(peak: Instant, setting: TrainSetting) -> str:
    """`backward of layers.0.blocks.1.mlp.fc1 (aten.mm)`, with the micro-batch where it matters."""
    where = f"{peak.phase} of {peak.path}" if peak.path else peak.phase
    where = IN_BACKWARD if peak.path == IN_BACKWARD else where
    text = f"{where} ({peak.label.removeprefix('aten.')})" if peak.label else where
    if setting.accumulate > 1 and peak.phase in ("forward", "backward"):
        text += f", micro-batch {peak.micro_batch}"
    return text


# Estimates of a step at a batch where it was not judged, from those at others.

Combine = Callable[..., float]
# Of an estimate, what follows from the batch; the verdict follows from these.
_BYTES = (
    "breakdown", "saved_activation_bytes", "peak_live_bytes", "peak_allocated_bytes",
    "peak_reserved_bytes", "device_total_bytes", "low_bytes", "high_bytes", "live_bytes",
    "pinned_host_bytes",
)  # fmt: skip


def on_line(low: TrainSetting, high: TrainSetting, setting: TrainSetting) -> Combine:
    """Of a figure at two batches that at the batch of `setting`."""
    share = (setting.batch_size - low.batch_size) / (high.batch_size - low.batch_size)
    return lambda a, b: a + (b - a) * share


def combined(by: Combine, setting: TrainSetting, like: Estimate, *of: Estimate) -> Estimate:
    """`like`, with the figures that `by` makes of those `of` others."""
    figures = {name: _mixed(by, *(getattr(one, name) for one in of)) for name in _BYTES}
    times = [one.throughput for one in of if one.throughput is not None]
    time = like.throughput
    if time is not None and len(times) == len(of):
        time = combined_time(by, setting, time, *times)
    return replace(like, setting=setting, throughput=time, **figures)


def combined_time(
    by: Combine, setting: TrainSetting, like: Throughput, *of: Throughput
) -> Throughput:
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
