"""Model + setting + GPU -> Estimate. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from planner.core.errors import refuse_faults
from planner.core.schema import Model, ResolvedSetting, SwinConfig, TrainSetting
from planner.core.schema.model import FactoryModel, unit_of
from planner.core.schema.setting import OWN_OPTIMIZER
from planner.core.torch_version import installed_version, why_untried
from planner.core.units import format_bytes
from planner.estimation.arguments import (
    NO_TARGET,
    ModelLike,
    SettingLike,
    Target,
    check_fields,
    read_model,
    read_setting,
    read_target,
)
from planner.estimation.ledgers import FusedAttention, fused_attention, left_out, step_ledger
from planner.ledger.ledger import CATEGORIES, IN_BACKWARD, Ledger
from planner.libraries.names import faults_of, find_library
from planner.machine.hardware.gpu import Gpu, check_precision, peak_flops
from planner.machine.hardware.overheads import (
    CommunicatorBytes,
    Overheads,
    communication_memory,
    overheads_for,
    was_emulated,
)
from planner.machine.torch_build import lacking_kernels
from planner.memory import compiled, scratch
from planner.memory.allocator_config import AllocatorConfig, options_text
from planner.memory.profile import MemoryProfile, profile_memory, profile_within_limit, steady_step
from planner.throughput.prediction import step_time
from planner.throughput.rates import DeviceRates, rates_for
from planner.throughput.result import Cost, Throughput, TrainingLength, read_length, training_cost
from planner.throughput.timeline import communication_basis, find_exchanges


@dataclass(frozen=True)
class Estimate:
    """What a training step needs of a device. All sizes in bytes.

    - `breakdown`: what is live at the peak instant, by category, and what comes on top.
    - `low_bytes`, `high_bytes`: the device's need is expected to lie between these.
    - `num_alloc_retries`: how often the caching allocator frees cached memory before steps recur.
      Where it is not 0, the step fits only because of that: reserved bytes are those it reserves
      then, and `high_bytes` is still of what it would reserve if there were more.
    - `as_eager`: the step is compiled and was not recorded. The bytes are the eager step's; only
      `low_bytes` and `high_bytes` say what the compiled one needs.
    - `cost`: of a whole training, where one was asked for.
    - `gpu`: a name of the catalogue; None where none was named.
    - `allocator`: the caching allocator's options; None for torch's defaults.
    - `unit`: what an item of the batch is called. `is_task`: a task of the user's makes the batch;
      otherwise images go in and logits come out.
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
        """The budget less the need; None where no budget was named."""
        return None if self.budget_bytes is None else self.budget_bytes - self.device_total_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the budget is enough; None where no budget was named."""
        return None if self.headroom_bytes is None else self.headroom_bytes >= 0

    @property
    def fits_surely(self) -> bool | None:
        """Whether even `high_bytes` fit; None where no budget was named."""
        if self.budget_bytes is None:
            return None
        return max(self.device_total_bytes, self.high_bytes) <= self.budget_bytes

    def with_cost(self, length: TrainingLength | None) -> Estimate:
        """This estimate, with how long a training of that `length` takes."""
        return replace(self, cost=training_cost(length, self.throughput))

    def as_json(self) -> dict[str, Any]:
        """The object that `planner estimate --json` prints: sizes are integers in bytes."""
        verdict = {n: getattr(self, n) for n in ("fits", "fits_surely", "headroom_bytes")}
        fields = {**vars(self), "parameters": self.num_parameters, **verdict}
        ends = {name: fields.pop(name) for name in ("low_bytes", "high_bytes")}
        names = ("path", "operation", "bytes")
        largest = [dict(zip(names, tensor, strict=True)) for tensor in self.largest_at_peak]
        del fields["num_parameters"]
        return {**fields, "largest_at_peak": largest, "uncertainty": ends}


def estimate(
    model: ModelLike,
    setting: SettingLike | None = None,
    *,
    gpu: str | Gpu | None = None,
    memory_bytes: int | str | None = None,
    allocator: str | AllocatorConfig | None = None,
    link: str | None = None,
    recorded: bool = False,
    epochs: float | None = None,
    images_per_epoch: int | None = None,
    **overrides: Any,
) -> Estimate:
    """The memory and time of one training step, without running it.

    - `model`: `LIBRARY:NAME`, `package.module:factory`, a configuration file, a `SwinConfig` or
      its fields.
    - `setting`: defaults to batch 64, bf16 autocast (fp16 where `gpu` has no bf16), adamw.
    - `gpu`: a name of the catalogue. `memory_bytes`: the budget, in bytes or as text (24GiB);
      without it the GPU's memory; with neither, `fits` is None.
    - `allocator`: the caching allocator's options; None means those that torch would find in this
      environment.
    - `link`: what joins several GPUs, as `planner estimate --link` takes it.
    - `recorded`: runs torch's own code on an emulated GPU, once, and keeps the recording. Any model
      but a Swin of native, timm or microsoft is always recorded, and so are their settings that
      have no step on shapes (fp8, ZeRO, most optimizers).
    - `epochs` of `images_per_epoch` each (None: ImageNet-1k's): the estimate then has a `cost`, the
      time of a whole training on `gpu`.
    - `overrides`: fields of the model or the setting; a `world_size` without a `parallelism` runs
      ddp.

    Raises UsageError for what is unknown, UnsupportedError for what the library cannot do.
    """
    target = read_target(gpu, memory_bytes, allocator, link, recorded)
    length = read_length(epochs, images_per_epoch, target.gpu)
    asked = read_resolved(model, setting, target.gpu, overrides)
    ledger = step_ledger(*asked, recorded, target.gpu)
    return estimate_ledger(*asked, ledger, target, allow_retries=True).with_cost(length)


def read_resolved(
    model: ModelLike, setting: SettingLike | None, gpu: Gpu | None, overrides: Mapping[str, Any]
) -> tuple[Model, ResolvedSetting]:
    """The model and the setting that the arguments of `estimate` mean, the setting resolved for
    the model's library."""
    return resolve(*read_model_and_setting(model, setting, gpu, overrides))


def read_model_and_setting(
    model: ModelLike, setting: SettingLike | None, gpu: Gpu | None, overrides: Mapping[str, Any]
) -> tuple[Model, TrainSetting]:
    """The model and the setting that the arguments of `estimate` mean, not resolved."""
    check_fields(overrides)
    of_setting = {k: v for k, v in overrides.items() if k in TrainSetting.model_fields}
    of_model = {k: v for k, v in overrides.items() if k not in of_setting}
    chosen = read_setting(setting, {"precision": default_precision(gpu)}, of_setting)
    check_precision(gpu, chosen.precision)
    return read_model(model, of_model), chosen


def resolve(model: Model, setting: TrainSetting) -> tuple[Model, ResolvedSetting]:
    """The setting as the model's library will run it. A model of no library of ours changes
    nothing in it but the recipe.

    Raises UsageError and UnsupportedError.
    """
    if not isinstance(model, SwinConfig):
        refuse_faults(faults_of(model, setting))
        return model, ResolvedSetting(setting.with_recipe(of_swin=False))
    return model, find_library(model.library).resolve(model, setting)


def default_precision(gpu: Gpu | None) -> str:
    """bf16, or fp16 where the device has no bf16."""
    return "fp16" if gpu is not None and not gpu.has_bf16 else "bf16"


def estimate_ledger(
    model: Model, setting: TrainSetting, ledger: Ledger, target: Target = NO_TARGET,
    rates: DeviceRates | None = None, allow_retries: bool = False, time: Throughput | None = None,
) -> Estimate:  # fmt: skip
    """What a ledger means for a target: totals, verdict, range, and what they rest on.

    `rates` predict the time (None: those of the target's GPU); `time` is their prediction where the
    caller has it already. With `allow_retries` a step fits too if it runs only because the
    allocator frees cached memory.
    """
    gpu, allocator = target.gpu, target.allocator
    capability = gpu.capability if gpu else None
    overheads = overheads_for(gpu, ledger.environment, is_known=was_emulated(model, setting))
    communicator = communication_memory(setting)
    ledger = scratch.size_scratch(ledger, overheads.processors)
    outside_bytes = overheads.context_bytes + communicator.num_bytes
    memory = _memory_within(target, ledger, overheads.workspace_bytes, outside_bytes, allow_retries)
    profile, live = memory.profile, memory.profile.live
    basis = _basis(setting, ledger, overheads)
    low, high = _range(model, setting, basis, memory, ledger)
    if rates is None and gpu is not None:
        rates = rates_for(gpu, model)
    exchanges = None if rates is None else find_exchanges(ledger, setting, gpu, target.link)
    if time is None and rates is not None:
        time = step_time(ledger, setting, rates, exchanges)
    is_offloaded = setting.offload != "none"
    pinned = scratch.pinned_activations(ledger) if is_offloaded else scratch.PinnedMemory()
    convolutions, kernels = _uncounted_kernels(model, ledger)
    if ledger.own_optimizer:
        setting = setting.model_copy(update={"optimizer": OWN_OPTIMIZER})
    return Estimate(
        model=model,
        setting=setting,
        num_parameters=ledger.num_parameters,
        breakdown=_breakdown(profile, overheads, communicator),
        saved_activation_bytes=live.saved_bytes + ledger.pooled_saved_bytes,
        peak_live_bytes=live.peak_bytes,
        peak_allocated_bytes=profile.peak_allocated_bytes,
        peak_reserved_bytes=profile.peak_reserved_bytes,
        device_total_bytes=profile.peak_reserved_bytes + outside_bytes,
        peak_at=_describe_peak(profile, setting),
        budget_bytes=target.budget_bytes,
        low_bytes=low + overheads.context_low_bytes + communicator.low_bytes,
        high_bytes=(
            high + overheads.context_high_bytes + communicator.high_bytes + convolutions.high_bytes
        ),
        assumed=(
            *_device_notes(target, overheads, communicator, memory),
            *_step_notes(setting, ledger, basis, pinned),
            *communication_basis(exchanges, setting),
        ),
        left_out=(
            *left_out(setting, convolutions, kernels, capability, ledger.is_recorded),
            *compiled.compiled_left_out(basis, setting),
            *([] if time is None else [f"of the time: {', '.join(time.left_out)}"]),
        ),
        throughput=time and _with_peak_share(time, gpu, setting),
        live_bytes=_phase_live_bytes(profile),
        largest_at_peak=profile.peak.largest,
        pinned_host_bytes=pinned.pinned_bytes + scratch.pinned_weights(ledger).pinned_bytes,
        num_alloc_retries=profile.num_alloc_retries,
        as_eager=setting.compile != "off" and basis is not compiled.RECORDED_BASIS,
        gpu=gpu.name if gpu else None,
        allocator=(allocator and options_text(allocator)) or None,
        unit=ledger.unit or unit_of(model),
        is_task=isinstance(model, FactoryModel) and bool(ledger.unit),
    )


@dataclass(frozen=True)
class _Memory:
    """The memory of a step on a device that has enough (`unlimited`); and `under_limit`, where it
    runs only because the allocator frees what it cached: with `missing_bytes` more it need not."""

    unlimited: MemoryProfile
    under_limit: MemoryProfile | None = None
    missing_bytes: int = 0

    @property
    def profile(self) -> MemoryProfile:
        """The memory on the device itself."""
        return self.under_limit or self.unlimited


def _memory_within(
    target: Target, ledger: Ledger, workspace_bytes: int, outside_bytes: int, allow_retries: bool
) -> _Memory:
    """The memory of a step, if `outside_bytes` of the target's budget are not the allocator's."""
    unlimited = profile_memory(ledger, workspace_bytes, target.allocator)
    if target.budget_bytes is None or not allow_retries:
        return _Memory(unlimited)
    allowed_bytes = target.budget_bytes - outside_bytes
    missing_bytes = unlimited.peak_reserved_bytes - allowed_bytes
    if missing_bytes <= 0:
        return _Memory(unlimited)
    under_limit = profile_within_limit(ledger, workspace_bytes, target.allocator, allowed_bytes)
    return _Memory(unlimited, under_limit, missing_bytes)


def _uncounted_kernels(
    model: Model, ledger: Ledger
) -> tuple[scratch.ConvolutionWorkspace, set[FusedAttention]]:
    """The kernels whose memory is not counted to the byte: the convolutions, and those of fused
    attention. A Swin's are known; another model's ledger tells them."""
    if isinstance(model, SwinConfig):
        return scratch.PATCH_EMBEDDING, set()
    return scratch.convolution_workspace(ledger), fused_attention(ledger)


def _device_notes(
    target: Target, overheads: Overheads, communicator: CommunicatorBytes, memory: _Memory
) -> Iterator[str]:
    """What is assumed of the device, its torch and its allocator."""
    if reason := why_untried(installed_version("torch")):
        yield f"torch allocates as it did before: {reason}"
    if target.gpu is not None and (reason := lacking_kernels(target.gpu.capability)):
        yield f"a torch that runs on this card: {reason}"
    yield from overheads.basis
    yield from communicator.basis
    yield _allocator_basis(target.allocator)
    if memory.under_limit is not None:
        yield _retries_basis(memory.under_limit, memory.missing_bytes)


def _step_notes(
    setting: TrainSetting, ledger: Ledger, basis: compiled.Basis, pinned: scratch.PinnedMemory
) -> Iterator[str]:
    """What is assumed of the step."""
    yield from _pinned_basis(pinned, setting)
    yield from ledger.notes
    yield from basis.notes
    yield from compiled.tuning_assumptions(setting)


def _basis(setting: TrainSetting, ledger: Ledger, overheads: Overheads) -> compiled.Basis:
    if setting.compile != "off":
        return compiled.compiled_basis(setting, ledger)
    return compiled.Basis(1 - overheads.reserved_error, 1 + overheads.reserved_error)


def _breakdown(
    memory: MemoryProfile, overheads: Overheads, communicator: CommunicatorBytes
) -> dict[str, int]:
    """Bytes at the peak instant by category, and what comes on top of live bytes."""
    breakdown: dict[str, int] = {c: memory.peak.by_category.get(c, 0) for c in CATEGORIES}
    workspace = overheads.num_workspaces * overheads.workspace_bytes + memory.workspace_bytes
    breakdown |= {
        "workspace": workspace,
        "allocator_overhead": memory.peak_reserved_bytes - memory.live.peak_bytes - workspace,
        "cuda_context": overheads.context_bytes,
    }
    if communicator.num_bytes:
        breakdown["communication"] = communicator.num_bytes
    return breakdown


def _range(
    model: Model, setting: TrainSetting, basis: compiled.Basis, memory: _Memory, ledger: Ledger
) -> tuple[int, int]:
    """The two ends between which the reserved bytes are expected to lie.

    Where the eager step stands for a compiled one, checkpointing may save nothing
    (`compiled.may_recompute_at_once`), and an activation memory budget below 1 may save its whole
    share.
    """
    saved_bytes = memory.profile.live.saved_bytes
    low = memory.profile.peak_reserved_bytes - ledger.doubtful_bytes
    high = memory.unlimited.peak_reserved_bytes + ledger.late_bytes
    if setting.offload_optimizer == "state-and-gradients":
        high += scratch.offloaded_gradient_bytes(ledger)
    if basis is compiled.EAGER_BASIS:
        low -= int((1 - setting.activation_memory_budget) * saved_bytes)
        if compiled.may_recompute_at_once(setting) and isinstance(model, SwinConfig):
            unchecked = setting.model_copy(update={"checkpointing": "none"})
            whole = step_ledger(model, find_library(model.library).resolve(model, unchecked))
            high += steady_step(whole).saved_bytes - saved_bytes
    return int(low * basis.low), int(high * basis.high)


def _allocator_basis(config: AllocatorConfig | None) -> str:
    how = "its default settings" if config is None else config.source or "the options given"
    return f"the caching allocator with {how}"


def _retries_basis(under_limit: MemoryProfile, missing_bytes: int) -> str:
    if under_limit.retries_each_step:
        how = f"{_in_words(under_limit.retries_each_step)} a step, which is slower"
    else:
        how = f"{_in_words(under_limit.num_alloc_retries)} in its first steps, which are slower"
    return (
        f"runs only by freeing cached memory {how}: {format_bytes(missing_bytes)} more would let "
        "it run without"
    )


def _in_words(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _pinned_basis(pinned: scratch.PinnedMemory, setting: TrainSetting) -> Iterator[str]:
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


def _with_peak_share(time: Throughput, gpu: Gpu | None, setting: TrainSetting) -> Throughput:
    """`time` with the share of the GPU's peak FLOP/s at which it computes, if the peak is known."""
    peak = None if gpu is None else peak_flops(gpu, setting.precision)
    share = None if peak is None else time.matrix_flops / time.step_seconds / peak
    return replace(time, peak_share=share)


def _phase_live_bytes(memory: MemoryProfile) -> dict[str, int]:
    """Live bytes at the end of each phase of the steady step (of its last micro-batch)."""
    ends = {"before_step": memory.live.before_step}
    for phase, num_bytes in memory.live.ends:
        ends[f"after_{phase}"] = num_bytes
    return ends


def _describe_peak(memory: MemoryProfile, setting: TrainSetting) -> str:
    """`backward of layers.0.blocks.1.mlp.fc1 (aten.mm)`, with the micro-batch where it matters."""
    peak = memory.peak
    where = f"{peak.phase} of {peak.path}" if peak.path else peak.phase
    where = IN_BACKWARD if peak.path == IN_BACKWARD else where
    text = f"{where} ({peak.label.removeprefix('aten.')})" if peak.label else where
    if setting.accumulate > 1 and peak.phase in ("forward", "backward"):
        text += f", micro-batch {peak.micro_batch}"
    return text
