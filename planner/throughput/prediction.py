"""Ledger + a device's rates -> seconds.

Each operation takes what its FLOPs or its bytes need, whichever is more (the roofline), after a
fixed start. The host issues operations ahead of the device: the device waits where the host is
late, which is what bounds small batches. `torch.compile` fuses chains of pointwise operations and
costs the host less; CUDA graphs cost it next to nothing. Imports no torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from planner.core.schema import Model, SwinConfig
from planner.core.schema.setting import GRAPH_MODES, TrainSetting
from planner.ledger.ledger import (
    COMPILED_CALL,
    IN_BACKWARD,
    Computed,
    Exchanged,
    OperationKind,
    Sent,
)
from planner.machine.hardware.gpu import ASSUMED_LINK, Gpu
from planner.throughput import efficiency
from planner.throughput.communication import (
    BETWEEN,
    OTHERS,
    WAITING,
    Communication,
    Exchanges,
    Priced,
    Timeline,
    Traffic,
    after_regions,
    collective_seconds,
    sent_bytes,
)
from planner.throughput.fusing import (
    COMPILED_PHASES,
    Operation,
    entries,
    fuse_between,
    regions_of,
    with_updates_last,
)
from planner.throughput.result import Accounts, Part

# What the device is busy with, or waits for, by `bound_seconds`: an operation counts whole as that
# which takes most of it.
BANDWIDTH, MATRIX_UNITS, STARTS = "bandwidth", "matrix units", "kernel starts"
LINK = "link to the host"

_MATRIX_KINDS = frozenset(("matmul", "conv", "grouped conv", "attention"))
# Of these the name tells the kernel: batched or not, with a bias or not, pooling.
_NAMED_KINDS = frozenset(("matmul", "attention", "reduction"))
_BATCHED = frozenset(("aten.bmm", "aten.baddbmm"))
_OVER_LISTS = ("_foreach_", "_fused_adam", "_fused_sgd")


# What kernels reach of a device's figures is fitted: planner/throughput/efficiency.py. The numbers
# below are assumptions.

# Of the matmul rate, by convolutions and fused attention; of the bandwidth, by what moves tensors.
_KIND_SHARE: Mapping[OperationKind, float] = MappingProxyType(
    {"matmul": 1.0, "conv": efficiency.CONVOLUTION_SHARE[""], "grouped conv": 1.0,
     "attention": efficiency.ATTENTION_SHARE, "pointwise": 1.0,
     "reduction": efficiency.REDUCTION_SHARE, "copy": 1.0, "transfer": 1.0}
)  # fmt: skip
# Start and drain of one kernel on the device, and of one inside a CUDA graph.
_KERNEL_SECONDS = 3e-6
_GRAPH_KERNEL_SECONDS = 1.5e-6
# What the host spends on an operation: Python modules, dispatcher and autograd's recording in the
# forward, autograd's engine in the backward; on a forward's that is recomputed there, whose saved
# tensors each pass two hooks in Python; on a further launch of one of backward's; on each launch
# over a list of weights (foreach, fused), whose elements it looks at in Python. Chosen 2026-11-30
# by the processor seconds of 79 steps of Swins and 13 other models on the emulated GPU, where
# kernels do nothing (`python -m tests.truth.host --law`), and by 120 steps on an NVIDIA H200 and an
# H100, times 2.6: between these two's hosts, by their own measured chains of small layers.
HOST_SECONDS: Mapping[str, float] = MappingProxyType(
    {"forward": 31e-6, "backward": 23e-6, "optimizer": 26e-6, "zero_grad": 12e-6,
     "recomputed": 104e-6, "backward launch": 150e-6, "list": 187e-6}
)  # fmt: skip
_LAUNCH_SECONDS = 9.6e-6
# Per launch of compiled code's wrapper; per replay of a graph.
_COMPILED_LAUNCH_SECONDS = 6e-6
_GRAPH_SECONDS = 30e-6
# A call of torch.compile's code for one weight, its guards looked at: measured with torch 2.13 and
# torchao 0.18 on one core of a Xeon, 2026-11-22, as the time of AdamW8bit.step of 50 small weights.
_COMPILED_CALL_SECONDS = 400e-6
# Per call of a compiled block and per backward through it (guards, AOTAutograd's wrapper).
# Measured: 64 and 67 us with its one kernel (torch 2.13, one thread of an AMD EPYC, 2026-11-22).
_REGION_SECONDS = 60e-6


@dataclass(frozen=True)
class DeviceRates:
    """What a device achieves, and `basis`: how that is known.

    `matmul_flops` are FLOP/s a large matmul reaches by dtype ("float32", "tf32", "bfloat16",
    "float16", "float8"); `bandwidth` is bytes/s of a copy (read + written); `kind_share` scales the
    matmul rate of conv and attention, and the bandwidth of pointwise, reduction and copy. Matmuls
    reach `backward_matmul_share` of their rate in backward. Of the bandwidth are `batch_norm_share`
    and, of convolutions, `convolution_bandwidth_share` or `channels_last_share`; `grouped_share` is
    of fp32's matmul rate, growing with that power (`grouped_power`) of multiply-adds
    (planner/throughput/efficiency.py); `num_sms` are a GPU's multiprocessors, where known.
    `link_bandwidth` is bytes/s between device and pinned host memory, either way; `attention_flops`
    are FLOP/s of fused attention by dtype, `biased_flops` those of the kernel that takes a bias
    where others go by the length of a sequence, and `compiled_bandwidth` the bytes/s of kernels
    that torch.compile makes, reductions too, where they are known by themselves.
    `host_seconds` is the host's cost of an operation by phase, and by what else costs more;
    `host_spread` how many times as long or as short it may be. `asynchronous`: the host runs ahead
    (CUDA); otherwise it computes itself (CPU) and both times add up.
    `uncertainty` is relative: 0.35 means the time may be off by 35% either way. It holds for eager
    steps in fp32 or 16 bits with eager attention, as most are measured, and with fused attention
    where `knows_fused`; `other_uncertainty` for all others.
    `kind_uncertainty`, where it is given, says it by kind of operation in place of `uncertainty`.
    """

    name: str
    basis: str
    matmul_flops: Mapping[str, float]
    bandwidth: float
    kind_share: Mapping[OperationKind, float] = field(default_factory=lambda: dict(_KIND_SHARE))
    kernel_seconds: float = _KERNEL_SECONDS
    graph_kernel_seconds: float = _GRAPH_KERNEL_SECONDS
    host_seconds: Mapping[str, float] = field(default_factory=lambda: dict(HOST_SECONDS))
    host_spread: float = efficiency.HOST_SPREAD
    launch_seconds: float = _LAUNCH_SECONDS
    compiled_launch_seconds: float = _COMPILED_LAUNCH_SECONDS
    graph_seconds: float = _GRAPH_SECONDS
    region_seconds: float = _REGION_SECONDS
    asynchronous: bool = True
    uncertainty: float = efficiency.WIDE_UNCERTAINTY
    other_uncertainty: float = efficiency.WIDE_UNCERTAINTY
    kind_uncertainty: Mapping[str, float] | None = None
    backward_matmul_share: float = 1.0
    batched_matmul_share: float = 1.0
    pooling_share: float = 1.0
    batch_norm_share: float | None = None
    convolution_bandwidth_share: float = 1.0
    channels_last_share: float = 1.0
    num_sms: int | None = None
    grouped_share: float | None = None
    grouped_power: float = efficiency.GROUPED_POWER["HBM"]
    link_bandwidth: float = efficiency.LINK_SHARE * ASSUMED_LINK
    attention_flops: Mapping[str, float] | None = None
    biased_flops: float | None = None
    compiled_bandwidth: float | None = None
    knows_fused: bool = False

    def matmul_rate(self, dtype: str, precision: str) -> float:
        """FLOP/s of a matmul on `dtype`. A dtype without matrix units runs at fp32's rate."""
        if dtype == "float32" and precision == "tf32" and "tf32" in self.matmul_flops:
            return self.matmul_flops["tf32"]
        dtype = "float8" if dtype.startswith("float8") else dtype
        return self.matmul_flops.get(dtype, self.matmul_flops["float32"])

    def matrix_rate(self, phase: str, operation: Computed, precision: str) -> float:
        """FLOP/s of a matmul, convolution or attention in `phase` under a setting's `precision`."""
        if operation.kind == "grouped conv":
            return self._grouped_rate(phase, operation, precision)
        if operation.kind == "attention" and self.attention_flops is not None:
            return self.attention_flops[operation.dtype]
        if operation.kind == "attention" and self.biased_flops and operation.dtype != "float32":
            return self._attention_rate(operation)
        if operation.kind == "conv" and precision != "fp32":
            precision = "tf32"  # cuDNN's default, which only a setting of fp32 turns off
        rate = self.matmul_rate(operation.dtype, precision) * self.kind_share[operation.kind]
        is_slower = phase == "backward" and operation.kind == "matmul"
        return rate * self.backward_matmul_share if is_slower else rate

    def _attention_rate(self, operation: Computed) -> float:
        """By the kernel and the tokens of a sequence, which are the FLOPs for each two bytes."""
        assert self.biased_flops is not None
        if "efficient" in operation.name:
            return self.biased_flops
        tokens = max(1.0, 2 * operation.flops / max(operation.num_bytes, 1))
        most = self.matmul_rate(operation.dtype, "") * efficiency.LONG_ATTENTION_SHARE
        return most * tokens / (tokens + efficiency.HALFWAY_TOKENS)

    def _grouped_rate(self, phase: str, operation: Computed, precision: str) -> float:
        """By the multiply-adds for each element that it moves; at most that of a dense convolution,
        which it is taken for where no more is known."""
        dense = self.matrix_rate(phase, operation._replace(kind="conv"), precision)
        if self.grouped_share is None:
            return dense
        num_bytes = 4 if operation.dtype == "float32" else 2
        multiply_adds = operation.flops / 2 / max(operation.num_bytes / num_bytes, 1)
        rate = self.matmul_flops["float32"] * self.grouped_share
        return min(dense, rate * float(multiply_adds**self.grouped_power))

    def moving_rate(self, operation: Computed, memory_format: str = "contiguous") -> float:
        """Bytes/s that an operation's tensors are read and written at, if that is what it takes."""
        if operation.kind == "conv":
            is_last = memory_format == "channels_last"
            share = self.channels_last_share if is_last else self.convolution_bandwidth_share
            return self.bandwidth * share
        if operation.kind in _MATRIX_KINDS:
            is_batched = operation.name in _BATCHED and operation.dtype != "float32"
            return self.bandwidth * (self.batched_matmul_share if is_batched else 1.0)
        usual = self.bandwidth * self.kind_share[operation.kind]
        if "pool" in operation.name:
            return usual * self.pooling_share
        if self.batch_norm_share is None or "batch_norm" not in operation.name:
            return usual
        busy = min(1.0, _num_channels(operation) / self.num_sms) if self.num_sms else 1.0
        share = self.batch_norm_share * busy
        if operation.dtype == "float32":
            share = min(efficiency.BATCH_NORM_MOST, efficiency.BATCH_NORM_FP32 * share)
        by_channel = self.bandwidth * share
        # Channels last, other kernels spread over rows: never slower (an H100's ResNet-50).
        return by_channel if memory_format == "contiguous" else max(usual, by_channel)

    def uncertainty_of(
        self, setting: TrainSetting, seconds: Mapping[str, float], host: float = 0.0
    ) -> float:
        """Of a step of `setting` that spends `seconds` by kind of operation and `host` on the host,
        relative: what was measured narrows it only for its like. Where the host may be what a step
        waits for, it is at least as wide as the host's own range."""
        took = sum(seconds.values())
        device = took - seconds.get(WAITING, 0.0) - seconds.get(OTHERS, 0.0)
        known = self._uncertainty_of(setting, seconds)
        if not self.asynchronous or not took:
            return known
        slow = max(took, self.host_spread * host)
        fast = min(took, max(device, host / self.host_spread))
        return max(known, 1 - took / slow, took / fast - 1)

    def _uncertainty_of(self, setting: TrainSetting, seconds: Mapping[str, float]) -> float:
        by_kind = self.kind_uncertainty
        knows = by_kind is not None or self.knows_fused or setting.attention == "eager"
        alike = setting.compile == "off" and knows
        alike = alike and setting.precision not in ("tf32", "fp8") and setting.offload == "none"
        alike = alike and setting.offload_optimizer == "none"
        total = sum(seconds.values())
        if by_kind is None:
            return self.uncertainty if alike else self.other_uncertainty
        known = 0.0
        for kind, share in seconds.items():
            special = [
                by_kind.get(f"{kind} {of}") for of in (setting.memory_format, setting.precision)
            ]
            usual = by_kind.get(kind, efficiency.WIDE_UNCERTAINTY)
            known += share * max((found for found in special if found is not None), default=usual)
        found = known / total if total else efficiency.WIDE_UNCERTAINTY
        found = min(found, efficiency.MOST_UNCERTAINTY)
        return max(found, self.uncertainty if alike else self.other_uncertainty)


@dataclass(frozen=True)
class StepTime(Accounts):
    """One steady optimizer step, predicted. The seconds of its `parts` sum to `step_seconds`;
    `host_seconds` and `device_seconds` are what each would take alone. `images_per_second` are
    those of one device. `matrix_flops` are the FLOPs of its matmuls, convolutions and attention,
    recomputed ones too, `launches` its kernels. `communication` is what it exchanges with
    other devices, where its ledger and the links say so."""

    step_seconds: float
    images_per_second: float
    basis: str
    uncertainty: float
    parts: tuple[Part, ...]
    matrix_flops: float
    launches: int
    host_seconds: float
    device_seconds: float
    left_out: tuple[str, ...] = ()
    communication: Communication | None = None


def predict_step(
    operations: Iterable[Operation],
    rates: DeviceRates,
    setting: TrainSetting,
    recorded_accumulate: int | None = None,
    exchanges: Exchanges | None = None,
) -> StepTime:
    """The time of one optimizer step that runs `operations` ((phase, operation), in order) and
    exchanges `exchanges` with other devices beside them.

    `operations` hold `recorded_accumulate` micro-batches (`setting.accumulate` where not given);
    the rest of the step's micro-batches take as long as those on average, and exchange what all
    but the last do.
    """
    step, kernels, exchanges = prepared(operations, rates, setting, recorded_accumulate, exchanges)
    step.matrix_flops = _matrix_flops(kernels)
    for phase, operation in kernels:
        step.launches[phase] += operation.kernels
    alone = step.time(None)
    return alone if exchanges is None else _together(step, exchanges, alone)


def prepared(
    operations: Iterable[Operation],
    rates: DeviceRates,
    setting: TrainSetting,
    recorded_accumulate: int | None,
    exchanges: Exchanges | None,
) -> tuple[_Step, list[Operation], Exchanges | None]:
    """The step priced, the kernels that it runs, and what it exchanges beside them, if anything."""
    ordered = with_updates_last(list(operations), setting)
    regions = regions_of(ordered, setting)
    events = exchanges.events if exchanges is not None else ()
    if setting.compile != "off":
        events = after_regions(events, [phase for phase, _ in ordered], regions)
        ordered, regions, events = fuse_between(ordered, regions, events)
    recorded = recorded_accumulate or setting.accumulate
    step = _Step(_price(ordered, regions, rates, setting), rates, setting, recorded)
    found = replace(exchanges, events=events) if exchanges is not None and events else None
    return step, ordered, found


def _together(step: _Step, exchanges: Exchanges, alone: StepTime) -> StepTime:
    """`alone` with what it exchanges. The range is that of the links: as slow as they may be, and
    as fast with nothing slowed by what overlaps."""
    spread = 1 + exchanges.fabric.spread
    slow = step.time(replace(exchanges, scale=exchanges.scale * spread)).step_seconds
    quick = replace(exchanges, scale=exchanges.scale / spread, contention=1.0)
    fast = step.time(quick).step_seconds
    time = step.time(exchanges)
    took = time.step_seconds
    setting = step.setting
    sent = [
        (step.share_of(exchange), exchange.event)
        for exchange in exchanges.events
        if isinstance(exchange.event, Sent)
    ]

    return replace(
        time,
        uncertainty=time.uncertainty + max(slow - took, took - fast) / took,
        communication=Communication(
            link=exchanges.fabric.name,
            seconds=sum(n * collective_seconds(exchanges, one, setting) for n, one in sent),
            exposed_seconds=time.kind_seconds.get(OTHERS, 0.0),
            sent_bytes=round(sum(n * sent_bytes(one, setting) for n, one in sent)),
            alone_seconds=alone.step_seconds,
            low_seconds=fast,
            high_seconds=slow,
        ),
    )


def rates_for(gpu: Gpu, model: Model | None = None) -> DeviceRates:
    """What `gpu` should achieve: its datasheet's figures times the fitted shares; for another
    `model` than a Swin, which the published steps are of, known less well."""
    is_held = model is None or isinstance(model, SwinConfig)
    tensor = efficiency.tensor_matmul_share(gpu)
    bandwidth = efficiency.bandwidth_share(gpu)
    peaks = {"tf32": gpu.tf32_flops, "bfloat16": gpu.bf16_flops, "float16": gpu.fp16_flops,
             "float8": gpu.fp8_flops}  # fmt: skip
    flops = {dtype: peak * tensor for dtype, peak in peaks.items() if peak is not None}
    fp32 = gpu.fp32_flops * efficiency.fp32_matmul_share(gpu)
    grouped = efficiency.grouped_kind(gpu)
    units = "fp32 lanes" if gpu.fp16_flops == gpu.fp32_flops else "matrix units"
    held = "" if gpu.name in efficiency.MEASURED_CARDS else ", none of them of this card"
    return DeviceRates(
        name=gpu.name,
        basis=(
            f"datasheet of {gpu.title}; assumes {bandwidth:.0%} of its bandwidth (fitted to "
            f"measurements{held}) and {tensor:.0%} of its {units}' FLOP/s (quoted)"
        ),
        matmul_flops={"float32": fp32, **flops},
        bandwidth=gpu.bandwidth * bandwidth,
        kind_share={**_KIND_SHARE, "conv": efficiency.convolution_share(gpu)},
        uncertainty=efficiency.uncertainty(gpu),
        compiled_bandwidth=gpu.bandwidth * max(bandwidth, efficiency.COMPILED_BANDWIDTH_SHARE),
        knows_fused=gpu.name in efficiency.FUSED_CARDS,
        kind_uncertainty=None if is_held else efficiency.kind_uncertainty(gpu),
        backward_matmul_share=efficiency.BACKWARD_MATMUL_SHARE,
        batched_matmul_share=efficiency.BATCHED_MATMUL_SHARE,
        pooling_share=efficiency.POOLING_SHARE,
        batch_norm_share=efficiency.batch_norm_share(gpu),
        convolution_bandwidth_share=efficiency.CONVOLUTION_BANDWIDTH_SHARE,
        channels_last_share=efficiency.CHANNELS_LAST_SHARE[grouped],
        num_sms=gpu.num_sms,
        grouped_share=efficiency.GROUPED_SHARE[grouped],
        grouped_power=efficiency.GROUPED_POWER[grouped],
        link_bandwidth=(gpu.link_bandwidth or ASSUMED_LINK) * efficiency.LINK_SHARE,
        attention_flops=(
            efficiency.window_attention_flops(gpu, max(model.windows) ** 2)
            if isinstance(model, SwinConfig)
            else None
        ),
        biased_flops=efficiency.biased_flops(gpu),
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
        # On the stream that computes, which waits, but for one without a kernel there: that goes
        # beside. A CPU's tensors are on the host: none moves.
        busy, bound = operation.num_bytes / rates.link_bandwidth, LINK
        if not rates.asynchronous or not operation.kernels:
            busy = 0.0
    elif operation.kind in _MATRIX_KINDS:
        rate = rates.matrix_rate(phase, operation, setting.precision)
        busy = operation.num_bytes / rates.moving_rate(operation, setting.memory_format)
        if operation.flops / rate >= busy:
            busy, bound = operation.flops / rate, MATRIX_UNITS
    elif setting.compile != "off" and rates.compiled_bandwidth is not None:
        busy = operation.num_bytes / rates.compiled_bandwidth
    else:
        busy = operation.num_bytes / rates.moving_rate(operation, setting.memory_format)
    return busy + start, STARTS if start > busy else bound


def _num_channels(operation: Computed) -> float:
    """Of a batch norm of N elements and C channels that trains, by its cost (`recording.costs`):
    N + 2 C FLOPs; b N bytes two or three times, and 24 C or 28 C of weights and statistics."""
    times, statistics = (3, 28) if "backward" in operation.name else (2, 24)
    each = times * (4 if operation.dtype == "float32" else 2)
    found = (operation.num_bytes - each * operation.flops) / (statistics - 2 * each)
    return max(abs(found), 1.0)  # without running statistics (standardised weights) it is negative


def host_seconds(phase: str, operation: Computed, rates: DeviceRates, mode: str) -> float:
    """What the host spends on issuing `operation` under compile mode `mode`."""
    if operation.name == COMPILED_CALL:
        return _COMPILED_CALL_SECONDS
    if mode == "off" or phase not in COMPILED_PHASES:
        seconds = rates.host_seconds
        if "list" in seconds and is_over_list(operation):
            return operation.kernels * seconds["list"]
        further = max(operation.kernels - 1, 0)
        each = seconds.get(f"{phase} launch", rates.launch_seconds)
        return seconds.get(phase, seconds["backward"]) + further * each
    if mode in GRAPH_MODES:
        return 0.0
    return operation.kernels * rates.compiled_launch_seconds


def _price(
    operations: Sequence[Operation],
    regions: Sequence[str | None],
    rates: DeviceRates,
    setting: TrainSetting,
) -> list[Priced]:
    """The cost of each. Operations that differ only in name and module are priced once."""
    eager = setting.uncompiled()
    known: dict[tuple[object, ...], Priced] = {}
    priced = []
    for (phase, operation), region in zip(operations, regions, strict=True):
        is_told = not operation.kernels or operation.kind in _NAMED_KINDS
        name = operation[0] if is_told else ""
        key = phase, region is None, name, operation[1:6], is_over_list(operation)
        cost = known.get(key)
        if cost is None:
            at = eager if region is None else setting
            busy, bound = _bound_device_seconds(phase, operation, rates, at)
            cost = known[key] = Priced(
                phase,
                (phase, operation.kind, bound),
                host_seconds(phase, operation, rates, at.compile),
                busy,
            )
        priced.append(cost)
    if setting.checkpointing != "none" and "recomputed" in rates.host_seconds:
        again = rates.host_seconds["recomputed"]
        priced = [
            cost._replace(issue=again) if is_again else cost
            for cost, is_again in zip(priced, recomputed(operations, regions), strict=True)
        ]
    call = _call_seconds(rates, setting)
    if not call:
        return priced
    entered = entries((phase for phase, _ in operations), regions)
    return [
        cost._replace(issue=cost.issue + call) if enters else cost
        for cost, enters in zip(priced, entered, strict=True)
    ]


def is_over_list(operation: Computed) -> bool:
    """Whether an operation's kernels each take a list of weights; in backward it has one."""
    return operation.path != IN_BACKWARD and any(word in operation.name for word in _OVER_LISTS)


def recomputed(operations: Sequence[Operation], regions: Sequence[str | None]) -> Iterator[bool]:
    """Which of `operations` a backward runs as its forward did; none of those that are compiled."""
    forward: Counter[tuple[object, ...]] = Counter()
    for (phase, operation), region in zip(operations, regions, strict=True):
        key = operation[0], operation[3:5], operation[6]
        forward[key] += phase == "forward"
        is_again = phase == "backward" and region is None and forward[key] > 0
        forward[key] -= is_again
        yield is_again


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


class _Step:
    """The priced operations of a step, of which `recorded` micro-batches were recorded."""

    def __init__(
        self, operations: Sequence[Priced], rates: DeviceRates, setting: TrainSetting, recorded: int
    ) -> None:
        self.operations = operations
        self.rates = rates
        self.setting = setting
        self.recorded = recorded
        self.matrix_flops: Mapping[str, int] = {}
        self.launches: dict[str, int] = defaultdict(int)

    def share_of(self, exchange: Exchanged) -> float:
        """How many times a recorded exchange happens in a step: the last micro-batch may exchange
        what the others do not."""
        return self._times(exchange.phase, exchange.micro_batch)

    def _times(self, phase: str, micro_batch: int) -> float:
        if phase not in COMPILED_PHASES or micro_batch >= self.recorded - 1:
            return 1.0
        return (self.setting.accumulate - 1) / (self.recorded - 1)

    def _scaled(self, phase: str, amount: float) -> float:
        """What the recorded micro-batches sum to, for all of the step's."""
        return amount * (self.setting.accumulate / self.recorded if phase in COMPILED_PHASES else 1)

    def line(self, exchanges: Exchanges | None, kind: type[Timeline] = Timeline) -> Timeline:
        """A step in the middle of a training, run."""
        traffic = Traffic(exchanges, self.setting) if exchanges is not None else None
        events = exchanges.events if exchanges is not None else ()
        line = kind(self.rates.asynchronous, self.setting.precision == "fp16", traffic)
        if self.rates.asynchronous:
            # The step counted starts with the host as far ahead as it got.
            line.advance(self.operations, events)
        line.run(self.operations, events)
        return line

    def spent(self, line: Timeline) -> list[tuple[Part, tuple[str, ...]]]:
        """Where the seconds of all micro-batches went, with what else an account says of them."""
        parts = [
            (Part(phase, kind, bound, self._scaled(phase, seconds)), tuple(what))
            for (phase, kind, bound, *what), seconds in line.accounts.items()
        ]
        return parts + [
            (Part(phase, OTHERS, BETWEEN, self._times(phase, micro_batch) * seconds), ())
            for (phase, micro_batch), seconds in line.exposed.items()
        ]

    def time(self, exchanges: Exchanges | None) -> StepTime:
        """Of a step in the middle of a training."""
        setting, rates = self.setting, self.rates
        line = self.line(exchanges)
        parts = [part for part, _ in self.spent(line)]
        waited = sum(part.seconds for part in parts if part.kind == WAITING)
        total = sum(part.seconds for part in parts)
        exposed = sum(part.seconds for part in parts if part.kind == OTHERS)
        kind_seconds: dict[str, float] = defaultdict(float)
        for part in parts:
            kind_seconds[part.kind] += part.seconds
        left_out = ["loading the data", "clocks falling under sustained load"]
        if setting.world_size > 1 and exchanges is None:
            left_out.append("communication between devices")
        if setting.offload_optimizer != "none":
            left_out.append(
                "the update of weights on the host, whose processor's rate nobody measured: the "
                "step takes at least what is predicted"
            )
        host = sum(self._scaled(p, s) for p, s in line.issuing.items())
        return StepTime(
            step_seconds=total,
            images_per_second=setting.batch_size * setting.accumulate / total if total else 0.0,
            basis=rates.basis,
            uncertainty=rates.uncertainty_of(setting, kind_seconds, host),
            parts=tuple(parts),
            matrix_flops=sum(self._scaled(p, flops) for p, flops in self.matrix_flops.items()),
            launches=round(sum(self._scaled(p, n) for p, n in self.launches.items())),
            host_seconds=host,
            device_seconds=total - waited - exposed,
            left_out=tuple(left_out),
        )


def _is_graphed(setting: TrainSetting) -> bool:
    return setting.compile in GRAPH_MODES
