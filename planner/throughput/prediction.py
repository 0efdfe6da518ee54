"""Ledger + a device's rates -> seconds.

Each operation takes what its FLOPs or its bytes need, whichever is more (the roofline), after a
fixed start. The host issues operations ahead of the device: the device waits where the host is
late, which is what bounds small batches. `torch.compile` fuses chains of pointwise operations and
costs the host less; CUDA graphs cost it next to nothing. Imports no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from planner.compiled import FUSED_PREFIX
from planner.hardware.gpu import ASSUMED_LINK, Gpu
from planner.ledger import COMPILED_CALL, Computed, OperationKind
from planner.schema.setting import GRAPH_MODES, TrainSetting
from planner.throughput import efficiency
from planner.throughput.parts import Accounts, Part
from planner.throughput.regions import COMPILED_PHASES, entries, regions_of

Operation = tuple[str, Computed]  # (phase, operation), as `Ledger.operations` yields them

WAITING = "waiting for the host"  # the entry of `kind_seconds` in which the device is idle

# What the device is busy with, or waits for, by `bound_seconds`: an operation counts whole as that
# which takes most of it.
HOST, BANDWIDTH, MATRIX_UNITS, STARTS = "host", "bandwidth", "matrix units", "kernel starts"
LINK = "link to the host"

_MATRIX_KINDS = frozenset(("matmul", "conv", "attention"))
_FUSIBLE_KINDS = frozenset(("pointwise", "reduction", "copy"))

# What kernels reach of a device's figures is fitted: planner/throughput/efficiency.py. The numbers
# below are assumptions, replaced by `planner doctor --rates` on a device at hand.

# Of the matmul rate, by a patch embedding's convolution (a patch is 48 numbers deep), and by
# attention where no rate of its own is known; of the bandwidth, by what moves tensors.
_KIND_SHARE: Mapping[OperationKind, float] = MappingProxyType(
    {"matmul": 1.0, "conv": 0.5, "attention": 0.35, "pointwise": 1.0,
     "reduction": efficiency.REDUCTION_SHARE, "copy": 1.0, "transfer": 1.0}
)  # fmt: skip
# Start and drain of one kernel on the device, and of one inside a CUDA graph.
_KERNEL_SECONDS = 3e-6
_GRAPH_KERNEL_SECONDS = 1.5e-6
# What the host spends per operation: Python modules, dispatcher and autograd's recording in the
# forward, autograd's C++ engine in the backward, foreach lists in the optimizer; per further
# launch of the same operation; per launch of compiled code's wrapper; per replay of a graph.
_HOST_SECONDS: Mapping[str, float] = MappingProxyType(
    {"forward": 15e-6, "backward": 10e-6, "optimizer": 10e-6, "zero_grad": 5e-6}
)
_LAUNCH_SECONDS = 4e-6
_COMPILED_LAUNCH_SECONDS = 6e-6
_GRAPH_SECONDS = 30e-6
# A call of torch.compile's code for one weight, its guards looked at: measured with torch 2.13 and
# torchao 0.18 on one core of a Xeon, 2026-11-22, as the time of AdamW8bit.step of 50 small weights.
_COMPILED_CALL_SECONDS = 400e-6
# Per call of a compiled block and per backward through it (guards, AOTAutograd's wrapper).
# Measured: 64 and 67 us with its one kernel (torch 2.13, one thread of an AMD EPYC, 2026-11-22).
_REGION_SECONDS = 60e-6
# Half-width of what the result may be off by, relative, by rates measured on the device.
MEASURED_UNCERTAINTY = 0.2
# A pointwise operation inside a chain reads and writes equally much. Fused, the read vanishes and
# the write stays only where backward needs it: between 0 and 1/2 of its bytes remain (derived);
# the middle is assumed.
_FUSED_BYTES_KEPT = 0.25


@dataclass(frozen=True)
class DeviceRates:
    """What a device achieves, and `basis`: how that is known.

    `matmul_flops` are FLOP/s a large matmul reaches by dtype ("float32", "tf32", "bfloat16",
    "float16", "float8"); `bandwidth` is bytes/s of a copy (read + written); `kind_share` scales the
    matmul rate of conv and attention, and the bandwidth of pointwise, reduction and copy. Matmuls
    and convolutions reach `backward_matmul_share` of their rate in backward. `attention_flops`,
    where it is known, is the rate of fused attention in any dtype. `link_bandwidth` is bytes/s
    between device and pinned host memory, either way.
    `host_seconds` is the host's cost of an operation by phase. `asynchronous`: the host runs ahead
    (CUDA); otherwise it computes itself (CPU) and both times add up.
    `uncertainty` is relative: 0.35 means the time may be off by 35% either way. It holds for eager
    steps in fp32 or 16 bits with eager attention, as most are measured; `other_uncertainty` for all
    others.
    """

    name: str
    basis: str
    matmul_flops: Mapping[str, float]
    bandwidth: float
    kind_share: Mapping[OperationKind, float] = field(default_factory=lambda: dict(_KIND_SHARE))
    kernel_seconds: float = _KERNEL_SECONDS
    graph_kernel_seconds: float = _GRAPH_KERNEL_SECONDS
    host_seconds: Mapping[str, float] = field(default_factory=lambda: dict(_HOST_SECONDS))
    launch_seconds: float = _LAUNCH_SECONDS
    compiled_launch_seconds: float = _COMPILED_LAUNCH_SECONDS
    graph_seconds: float = _GRAPH_SECONDS
    region_seconds: float = _REGION_SECONDS
    asynchronous: bool = True
    uncertainty: float = efficiency.WIDE_UNCERTAINTY
    other_uncertainty: float = efficiency.WIDE_UNCERTAINTY
    backward_matmul_share: float = 1.0
    attention_flops: float | None = None
    link_bandwidth: float = efficiency.LINK_SHARE * ASSUMED_LINK

    def matmul_rate(self, dtype: str, precision: str) -> float:
        """FLOP/s of a matmul on `dtype`. A dtype without matrix units runs at fp32's rate."""
        if dtype == "float32" and precision == "tf32" and "tf32" in self.matmul_flops:
            return self.matmul_flops["tf32"]
        dtype = "float8" if dtype.startswith("float8") else dtype
        return self.matmul_flops.get(dtype, self.matmul_flops["float32"])

    def matrix_rate(self, phase: str, operation: Computed, precision: str) -> float:
        """FLOP/s of a matmul, convolution or attention in `phase` under a setting's `precision`."""
        if operation.kind == "attention":
            shared = self.matmul_rate(operation.dtype, precision) * self.kind_share["attention"]
            return self.attention_flops or shared
        if operation.kind == "conv" and precision != "fp32":
            precision = "tf32"  # cuDNN's default, which only a setting of fp32 turns off
        rate = self.matmul_rate(operation.dtype, precision) * self.kind_share[operation.kind]
        return rate * self.backward_matmul_share if phase == "backward" else rate

    def uncertainty_of(self, setting: TrainSetting) -> float:
        """Of a step of `setting`, relative: what was measured narrows it only for its like."""
        alike = setting.compile == "off" and setting.attention == "eager"
        alike = alike and setting.precision not in ("tf32", "fp8") and setting.offload == "none"
        return self.uncertainty if alike else self.other_uncertainty


@dataclass(frozen=True)
class StepTime(Accounts):
    """One steady optimizer step, predicted. The seconds of its `parts` sum to `step_seconds`;
    `host_seconds` and `device_seconds` are what each would take alone. `matrix_flops` are the
    FLOPs of its matmuls, convolutions and attention, recomputed ones too."""

    step_seconds: float
    images_per_second: float
    basis: str
    uncertainty: float
    parts: tuple[Part, ...]
    matrix_flops: float
    host_seconds: float
    device_seconds: float
    left_out: tuple[str, ...] = ()

    @property
    def host_bound(self) -> bool:
        """Whether the device waits for the host for more than a tenth of the step."""
        return self.kind_seconds.get(WAITING, 0.0) > 0.1 * self.step_seconds


def predict_step(
    operations: Iterable[Operation],
    rates: DeviceRates,
    setting: TrainSetting,
    recorded_accumulate: int | None = None,
) -> StepTime:
    """The time of one optimizer step that runs `operations` ((phase, operation), in order).

    `operations` hold `recorded_accumulate` micro-batches (`setting.accumulate` where not given);
    the rest of the step's micro-batches take as long as those on average. Images per second are
    those of one device.
    """
    recorded = recorded_accumulate or setting.accumulate
    ordered = with_updates_last(list(operations), setting)
    regions = regions_of(ordered, setting)
    if setting.compile != "off":
        ordered, regions = fuse_operations(ordered, regions)
    priced = _price(ordered, regions, rates, setting)
    timeline = _Timeline(rates, setting)
    if rates.asynchronous:
        timeline.advance(priced)  # the step counted starts with the host as far ahead as it got
    timeline.run(priced)
    return timeline.result(setting.accumulate / recorded, _matrix_flops(ordered))


def with_updates_last(operations: list[Operation], setting: TrainSetting) -> list[Operation]:
    """Updates in backward follow that of a compiled model: it hands over all gradients as it
    returns."""
    is_whole = setting.compile != "off" and setting.compile_scope == "model"
    if not setting.optimizer_in_backward or not is_whole:
        return operations
    return sorted(operations, key=lambda operation: operation[0] == "optimizer")


def fuse_operations(
    operations: Sequence[Operation], regions: Sequence[str | None]
) -> tuple[list[Operation], list[str | None]]:
    """`operations` as Inductor runs them, and their `regions`: a chain of pointwise, reduction and
    copy operations in one phase of a compiled region becomes one kernel per reduction (at least
    one), and most of what it would write between them stays in registers. What is in no region is
    left as it is."""
    fused: list[Operation] = []
    where: list[str | None] = []
    chain: list[Computed] = []
    chained: tuple[str, str | None] = ("", None)

    def add(phase: str, operation: Computed, region: str | None) -> None:
        fused.append((phase, operation))
        where.append(region)

    for (phase, operation), region in zip(operations, regions, strict=True):
        fusible = operation.kind in _FUSIBLE_KINDS and region is not None
        fusible = fusible and not operation.name.startswith(FUSED_PREFIX)  # fused already
        if chain and (not fusible or (phase, region) != chained):
            add(chained[0], _fuse(chain), chained[1])
            chain = []
        if fusible:
            chain.append(operation)
            chained = phase, region
        else:
            add(phase, operation, region)
    if chain:
        add(chained[0], _fuse(chain), chained[1])
    return fused, where


def rates_for(gpu: Gpu) -> DeviceRates:
    """What `gpu` should achieve: its datasheet's figures times the fitted shares."""
    tensor = efficiency.tensor_matmul_share(gpu)
    bandwidth = efficiency.bandwidth_share(gpu)
    peaks = {"tf32": gpu.tf32_flops, "bfloat16": gpu.bf16_flops, "float16": gpu.fp16_flops,
             "float8": gpu.fp8_flops}  # fmt: skip
    flops = {dtype: peak * tensor for dtype, peak in peaks.items() if peak is not None}
    fp32 = gpu.fp32_flops * efficiency.fp32_matmul_share(gpu)
    attention = None
    if gpu.num_sms is not None:
        attention = gpu.num_sms * efficiency.ATTENTION_FLOPS_PER_SM
    held = "" if gpu.name in efficiency.MEASURED_CARDS else ", none of them of this card"
    return DeviceRates(
        name=gpu.name,
        basis=(
            f"datasheet of {gpu.title}; {bandwidth:.0%} of its bandwidth is reached, as fitted to "
            f"published measurements{held}, and {tensor:.0%} of its matrix units' FLOP/s, as quoted"
        ),
        matmul_flops={"float32": fp32, **flops},
        bandwidth=gpu.bandwidth * bandwidth,
        uncertainty=efficiency.uncertainty(gpu),
        backward_matmul_share=efficiency.BACKWARD_MATMUL_SHARE,
        attention_flops=attention,
        link_bandwidth=(gpu.link_bandwidth or ASSUMED_LINK) * efficiency.LINK_SHARE,
    )


def device_seconds(
    phase: str, operation: Computed, rates: DeviceRates, setting: TrainSetting
) -> float:
    """The roofline: FLOPs or bytes, whichever takes longer, after the kernels' own start."""
    return _bound_device_seconds(phase, operation, rates, setting)[0]


def _bound_device_seconds(
    phase: str, operation: Computed, rates: DeviceRates, setting: TrainSetting
) -> tuple[float, str]:
    """`device_seconds`, and what takes most of them."""
    start = rates.kernel_seconds
    if _is_graphed(setting):
        start = rates.graph_kernel_seconds
    start *= operation.kernels
    bound = BANDWIDTH
    if operation.kind == "transfer":
        # On the stream that computes, which waits. A CPU's tensors are on the host: none moves.
        busy, bound = operation.num_bytes / rates.link_bandwidth, LINK
        if not rates.asynchronous:
            busy = 0.0
    elif operation.kind in _MATRIX_KINDS:
        rate = rates.matrix_rate(phase, operation, setting.precision)
        busy = operation.num_bytes / rates.bandwidth
        if operation.flops / rate >= busy:
            busy, bound = operation.flops / rate, MATRIX_UNITS
    else:
        busy = operation.num_bytes / (rates.bandwidth * rates.kind_share[operation.kind])
    return busy + start, STARTS if start > busy else bound


def host_seconds(phase: str, operation: Computed, rates: DeviceRates, mode: str) -> float:
    """What the host spends on issuing `operation` under compile mode `mode`."""
    if operation.name == COMPILED_CALL:
        return _COMPILED_CALL_SECONDS
    if mode == "off" or phase not in COMPILED_PHASES:
        further = max(operation.kernels - 1, 0) * rates.launch_seconds
        return rates.host_seconds.get(phase, rates.host_seconds["backward"]) + further
    if mode in GRAPH_MODES:
        return 0.0
    return operation.kernels * rates.compiled_launch_seconds


class _Priced(NamedTuple):
    """What one operation costs the host to issue and the device to do, in seconds."""

    phase: str
    account: tuple[str, str, str]  # phase, kind, bound
    issue: float
    busy: float


def _price(
    operations: Sequence[Operation],
    regions: Sequence[str | None],
    rates: DeviceRates,
    setting: TrainSetting,
) -> list[_Priced]:
    """The cost of each. Operations that differ only in name and module are priced once."""
    eager = setting.uncompiled()
    known: dict[tuple[object, ...], _Priced] = {}
    priced = []
    for (phase, operation), region in zip(operations, regions, strict=True):
        name = operation[0] if not operation.kernels else ""
        key = phase, region is None, name, operation[1:6]
        cost = known.get(key)
        if cost is None:
            at = eager if region is None else setting
            busy, bound = _bound_device_seconds(phase, operation, rates, at)
            cost = known[key] = _Priced(
                phase,
                (phase, operation.kind, bound),
                host_seconds(phase, operation, rates, at.compile),
                busy,
            )
        priced.append(cost)
    call = _call_seconds(rates, setting)
    if not call:
        return priced
    entered = entries((phase for phase, _ in operations), regions)
    return [
        cost._replace(issue=cost.issue + call) if enters else cost
        for cost, enters in zip(priced, entered, strict=True)
    ]


def _call_seconds(rates: DeviceRates, setting: TrainSetting) -> float:
    """What the host spends on entering a compiled region; on the only one, next to nothing."""
    if _is_graphed(setting):
        return rates.graph_seconds
    return rates.region_seconds if setting.compile_scope == "blocks" else 0.0


def _matrix_flops(operations: Iterable[Operation]) -> dict[str, int]:
    """FLOPs of matmuls, convolutions and attention, by phase."""
    flops: dict[str, int] = defaultdict(int)
    for phase, operation in operations:
        if operation.kind in _MATRIX_KINDS:
            flops[phase] += operation.flops
    return flops


class _Timeline:
    """Host and device clocks in seconds, and where the device's time went in what was `run`."""

    def __init__(self, rates: DeviceRates, setting: TrainSetting) -> None:
        self.rates = rates
        self.setting = setting
        self.host = 0.0
        self.device = 0.0
        self.accounts: dict[tuple[str, str, str], float] = defaultdict(float)
        self.issuing: dict[str, float] = defaultdict(float)

    def advance(self, operations: Sequence[_Priced]) -> None:
        """`run` without account of it, where the host runs ahead."""
        previous = ""
        for phase, _, issue, busy in operations:
            if phase != previous:
                self._enter(phase)
                previous = phase
            self.host += issue
            if self.host > self.device:
                self.device = self.host
            self.device += busy
        self.issuing.clear()

    def run(self, operations: Sequence[_Priced]) -> None:
        accounts, issuing, asynchronous = self.accounts, self.issuing, self.rates.asynchronous
        previous = ""
        for phase, key, issue, busy in operations:
            if phase != previous:
                self._enter(phase)
                previous = phase
            self.host += issue
            issuing[phase] += issue
            if self.host > self.device:
                accounts[phase, WAITING, HOST] += self.host - self.device
                self.device = self.host
            self.device += busy
            accounts[key] += busy
            if not asynchronous:
                self.host = self.device

    def _enter(self, phase: str) -> None:
        if phase == "optimizer" and self.setting.precision == "fp16":
            # GradScaler reads found_inf on the host before it lets the optimizer step.
            self.host = max(self.host, self.device)

    def result(self, micro_batch_scale: float, matrix_flops: Mapping[str, int]) -> StepTime:
        """`micro_batch_scale`: micro-batches of a step over those that were run here, which did
        `matrix_flops` by phase."""

        def scaled(phase: str, amount: float) -> float:
            return amount * (micro_batch_scale if phase in COMPILED_PHASES else 1.0)

        parts = tuple(
            Part(phase, kind, bound, scaled(phase, seconds))
            for (phase, kind, bound), seconds in self.accounts.items()
        )
        total = sum(part.seconds for part in parts)
        waited = sum(part.seconds for part in parts if part.kind == WAITING)
        images = self.setting.batch_size * self.setting.accumulate
        left_out = ["loading the data", "clocks falling under sustained load"]
        if self.setting.world_size > 1:
            left_out.append("communication between devices")
        return StepTime(
            step_seconds=total,
            images_per_second=images / total if total else 0.0,
            basis=self.rates.basis,
            uncertainty=self.rates.uncertainty_of(self.setting),
            parts=parts,
            matrix_flops=sum(scaled(p, flops) for p, flops in matrix_flops.items()),
            host_seconds=sum(scaled(p, s) for p, s in self.issuing.items()),
            device_seconds=total - waited,
            left_out=tuple(left_out),
        )


def _is_graphed(setting: TrainSetting) -> bool:
    return setting.compile in GRAPH_MODES


def _fuse(chain: Sequence[Computed]) -> Computed:
    if len(chain) == 1:
        return chain[0]
    largest = max(chain, key=lambda operation: operation.num_bytes)
    others = sum(operation.num_bytes for operation in chain) - largest.num_bytes
    return Computed(
        name=f"fused_{len(chain)}",
        kind=largest.kind,
        dtype=largest.dtype,
        flops=sum(operation.flops for operation in chain),
        num_bytes=largest.num_bytes + int(_FUSED_BYTES_KEPT * others),
        kernels=max(1, sum(operation.kind == "reduction" for operation in chain)),
        path=chain[0].path,
    )
