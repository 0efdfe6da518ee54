"""Ledger + a device's rates -> seconds.

Each operation takes what its FLOPs or its bytes need, whichever is more (the roofline), after a
fixed start. The host issues operations ahead of the device: the device waits where the host is
late, which is what bounds small batches. `torch.compile` fuses chains of pointwise operations
(`fusion.py`) and costs the host less; CUDA graphs cost it next to nothing. First what callers ask
for, then the cost of each operation, then the step that they add up to. Imports no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from planner.core.schema import Model
from planner.core.schema.record import Phase
from planner.core.schema.setting import GRAPH_MODES, TrainSetting
from planner.ledger.ledger import (
    COMPILED_CALL,
    IN_BACKWARD,
    LEDGER_MICRO_BATCHES,
    Computed,
    Ledger,
    Operation,
    Sent,
)
from planner.machine.hardware.gpu import Gpu
from planner.throughput.fusion import (
    COMPILED_PHASES,
    find_regions,
    fuse_between_exchanges,
    mark_entries,
    move_updates_last,
)
from planner.throughput.rates import MATRIX_KINDS, DeviceRates, rates_for
from planner.throughput.result import (
    BANDWIDTH,
    COLLECTIVE_WAIT,
    DEVICE_LINK,
    HOST_LINK,
    KERNEL_STARTS,
    MATRIX_UNITS,
    CallPart,
    Communication,
    Part,
    Throughput,
)
from planner.throughput.timeline import (
    Exchanges,
    Priced,
    Timeline,
    Traffic,
    collective_seconds,
    delay_to_region_ends,
    find_exchanges,
    sent_bytes,
)

# The kinds whose rate depends on the operation's name: batched or not, with a bias or not, pooling.
_NAMED_KINDS = frozenset(("matmul", "attention", "reduction"))
_LIST_OPERATIONS = ("_foreach_", "_fused_adam", "_fused_sgd")
# Host seconds of a call of torch.compile's code for one weight, with the check of its guards:
# measured with torch 2.13 and torchao 0.18 on one core of a Xeon, 2026-11-22, as the time of
# AdamW8bit.step of 50 small weights.
_COMPILED_CALL_SECONDS = 400e-6


def step_time(
    ledger: Ledger, setting: TrainSetting, rates: DeviceRates, exchanges: Exchanges | None = None
) -> Throughput:
    """The time of the steady optimizer step of `ledger`."""
    num_micro_batches = min(setting.accumulate, LEDGER_MICRO_BATCHES)
    return predict_step(ledger.operations(), rates, setting, num_micro_batches, exchanges)


def call_parts(
    ledger: Ledger, model: Model, setting: TrainSetting, gpu: Gpu, link: str | None
) -> tuple[CallPart, ...]:
    """The seconds of `step_time` on a GPU, by operation and the module it ran in: they sum to the
    same.

    A wait of the device has no operation: its `name` and `path` are "". The operations of a
    compiled step are its fused kernels, each in the module of its first operation.
    """
    num_micro_batches = min(setting.accumulate, LEDGER_MICRO_BATCHES)
    rates, exchanges = rates_for(gpu, model), find_exchanges(ledger, setting, gpu, link)
    operations = ledger.operations()
    step, exchanges = _prepare_step(operations, rates, setting, num_micro_batches, exchanges)
    step.priced = [
        priced._replace(account=(*priced.account, operation.name, operation.path))
        for priced, (_, operation) in zip(step.priced, step.kernels, strict=True)
    ]
    parts = step.split_seconds(step.run_timeline(exchanges))
    return tuple(CallPart(*part, *operation) for part, operation in parts)


def predict_step(
    operations: Iterable[Operation],
    rates: DeviceRates,
    setting: TrainSetting,
    num_micro_batches: int | None = None,
    exchanges: Exchanges | None = None,
) -> Throughput:
    """The time of one optimizer step that runs `operations` ((phase, operation), in order) and
    communicates over `exchanges` beside them.

    `operations` hold `num_micro_batches` micro-batches (None: all `setting.accumulate` of them).
    Each further micro-batch of the step takes as long as those on average, and exchanges what all
    but the last do.
    """
    step, exchanges = _prepare_step(operations, rates, setting, num_micro_batches, exchanges)
    alone = step.predict(None)
    return alone if exchanges is None else _add_communication(step, exchanges, alone)


def _prepare_step(
    operations: Iterable[Operation],
    rates: DeviceRates,
    setting: TrainSetting,
    num_micro_batches: int | None,
    exchanges: Exchanges | None,
) -> tuple[_PricedStep, Exchanges | None]:
    """The priced step, and its exchanges, if any, placed among its kernels."""
    kernels = move_updates_last(list(operations), setting)
    regions = find_regions(kernels, setting)
    events = exchanges.events if exchanges is not None else ()
    if setting.compile != "off":
        events = delay_to_region_ends(events, [phase for phase, _ in kernels], regions)
        kernels, regions, events = fuse_between_exchanges(kernels, regions, events)
    priced = _price_operations(kernels, regions, rates, setting)
    step = _PricedStep(kernels, priced, rates, setting, num_micro_batches or setting.accumulate)
    return step, replace(exchanges, events=events) if exchanges is not None and events else None


def _add_communication(step: _PricedStep, exchanges: Exchanges, alone: Throughput) -> Throughput:
    """The step with its communication; `alone` is the same step without. The range is that of the
    links: the slow end with the slowest links, the fast end with the fastest ones and without
    contention."""
    spread = 1 + exchanges.fabric.spread
    slow = step.predict(replace(exchanges, scale=exchanges.scale * spread)).step_seconds
    fastest = replace(exchanges, scale=exchanges.scale / spread, contention=1.0)
    fast = step.predict(fastest).step_seconds
    throughput = step.predict(exchanges)
    seconds, setting = throughput.step_seconds, step.setting
    sent = [
        (step.repeats(exchange.phase, exchange.micro_batch), exchange.event)
        for exchange in exchanges.events
        if isinstance(exchange.event, Sent)
    ]

    return replace(
        throughput,
        uncertainty=throughput.uncertainty + max(slow - seconds, seconds - fast) / seconds,
        communication=Communication(
            link=exchanges.fabric.name,
            seconds=sum(n * collective_seconds(exchanges, event, setting) for n, event in sent),
            exposed_seconds=throughput.kind_seconds.get(COLLECTIVE_WAIT, 0.0),
            sent_bytes=round(sum(n * sent_bytes(event, setting) for n, event in sent)),
            alone_seconds=alone.step_seconds,
            low_seconds=fast,
            high_seconds=slow,
        ),
    )


# The cost of one operation, for the device and for the host.


def device_seconds(
    phase: Phase, operation: Computed, rates: DeviceRates, setting: TrainSetting
) -> float:
    """The roofline: FLOPs or bytes, whichever takes longer, after the kernels' own start."""
    return _bound_device_seconds(phase, operation, rates, setting)[0]


def _bound_device_seconds(
    phase: Phase, operation: Computed, rates: DeviceRates, setting: TrainSetting
) -> tuple[float, str]:
    """`device_seconds`, and the bound: what takes most of them."""
    start = rates.kernel_seconds
    if _is_graphed(setting):
        start = rates.graph_kernel_seconds
    start *= operation.kernels
    bound = BANDWIDTH
    if operation.kind == "transfer":
        # The compute stream waits for a transfer that has a kernel there; one without a kernel runs
        # beside it. A CPU's tensors are on the host: none moves.
        busy, bound = operation.num_bytes / rates.link_bandwidth, HOST_LINK
        if not rates.asynchronous or not operation.kernels:
            busy = 0.0
    elif operation.kind in MATRIX_KINDS:
        rate = rates.matrix_rate(phase, operation, setting.precision)
        busy = operation.num_bytes / rates.moving_rate(operation, setting.memory_format)
        if operation.flops / rate >= busy:
            busy, bound = operation.flops / rate, MATRIX_UNITS
    elif setting.compile != "off" and rates.compiled_bandwidth is not None:
        busy = operation.num_bytes / rates.compiled_bandwidth
    else:
        busy = operation.num_bytes / rates.moving_rate(operation, setting.memory_format)
    return busy + start, KERNEL_STARTS if start > busy else bound


def host_seconds(phase: Phase, operation: Computed, rates: DeviceRates, mode: str) -> float:
    """The host's time to issue `operation` under compile mode `mode`."""
    if operation.name == COMPILED_CALL:
        return _COMPILED_CALL_SECONDS
    if mode == "off" or phase not in COMPILED_PHASES:
        seconds = rates.host_seconds
        if "list" in seconds and is_over_list(operation):
            return operation.kernels * seconds["list"]
        further_launches = max(operation.kernels - 1, 0)
        launch_seconds = seconds.get(f"{phase} launch", rates.launch_seconds)
        return seconds.get(phase, seconds["backward"]) + further_launches * launch_seconds
    if mode in GRAPH_MODES:
        return 0.0
    return operation.kernels * rates.compiled_launch_seconds


def _price_operations(
    operations: Sequence[Operation],
    regions: Sequence[str | None],
    rates: DeviceRates,
    setting: TrainSetting,
) -> list[Priced]:
    """The cost of each operation. Those that differ only in name and module are priced once."""
    eager = setting.uncompiled()
    costs: dict[tuple[object, ...], Priced] = {}
    priced = []
    for (phase, operation), region in zip(operations, regions, strict=True):
        needs_name = not operation.kernels or operation.kind in _NAMED_KINDS
        name = operation[0] if needs_name else ""
        key = phase, region is None, name, operation[1:6], is_over_list(operation)
        cost = costs.get(key)
        if cost is None:
            its_setting = eager if region is None else setting
            busy, bound = _bound_device_seconds(phase, operation, rates, its_setting)
            cost = costs[key] = Priced(
                phase,
                (phase, operation.kind, bound),
                host_seconds(phase, operation, rates, its_setting.compile),
                busy,
            )
        priced.append(cost)
    if setting.checkpointing != "none" and "recomputed" in rates.host_seconds:
        issue = rates.host_seconds["recomputed"]
        priced = [
            cost._replace(issue=issue) if is_recomputed else cost
            for cost, is_recomputed in zip(
                priced, mark_recomputed(operations, regions), strict=True
            )
        ]
    call_seconds = _region_call_seconds(rates, setting)
    if not call_seconds:
        return priced
    enters_region = mark_entries((phase for phase, _ in operations), regions)
    return [
        cost._replace(issue=cost.issue + call_seconds) if enters else cost
        for cost, enters in zip(priced, enters_region, strict=True)
    ]


def is_over_list(operation: Computed) -> bool:
    """Whether an operation's kernels each take a list of weights; in backward it takes one."""
    names = _LIST_OPERATIONS
    return operation.path != IN_BACKWARD and any(name in operation.name for name in names)


def mark_recomputed(
    operations: Sequence[Operation], regions: Sequence[str | None]
) -> Iterator[bool]:
    """For each operation, whether backward runs it again as forward did; False where compiled. What
    a module recomputes, it does from its first operation on and before its first gradient."""
    forward: defaultdict[str, list[tuple[object, ...]]] = defaultdict(list)
    for (phase, operation), region in zip(operations, regions, strict=True):
        key, left = (operation[0], operation[3:5]), forward[operation.path]
        is_recomputed = phase == "backward" and left[:1] == [key]
        if phase == "forward":
            left.append(key)
        else:
            del left[: 1 if is_recomputed else None]
        yield is_recomputed and region is None


def _region_call_seconds(rates: DeviceRates, setting: TrainSetting) -> float:
    """The host's time to enter a compiled region; that of the only one is next to nothing."""
    if _is_graphed(setting):
        return rates.graph_seconds
    return rates.region_seconds if setting.compile_scope == "blocks" else 0.0


class _PricedStep:
    """The kernels of a step, in order, with the cost of each: those of `num_micro_batches` of its
    micro-batches. The host and the device run them in a `Timeline`."""

    def __init__(
        self,
        kernels: Sequence[Operation],
        priced: Sequence[Priced],
        rates: DeviceRates,
        setting: TrainSetting,
        num_micro_batches: int,
    ) -> None:
        self.kernels, self.priced = kernels, priced
        self.rates, self.setting = rates, setting
        self.num_micro_batches = num_micro_batches
        self.matrix_flops: dict[Phase, int] = defaultdict(int)  # both by phase
        self.launches: dict[Phase, int] = defaultdict(int)
        for phase, operation in kernels:
            self.launches[phase] += operation.kernels
            if operation.kind in MATRIX_KINDS:
                self.matrix_flops[phase] += operation.flops

    def repeats(self, phase: Phase, micro_batch: int) -> float:
        """How many times a step repeats an exchange of the ledger's `micro_batch`: the last one may
        exchange what the others do not."""
        if phase not in COMPILED_PHASES or micro_batch >= self.num_micro_batches - 1:
            return 1.0
        return (self.setting.accumulate - 1) / (self.num_micro_batches - 1)

    def _scale(self, phase: Phase, amount: float) -> float:
        """The `amount` of all micro-batches of the step, from that of those in the ledger."""
        times = self.setting.accumulate / self.num_micro_batches
        return amount * (times if phase in COMPILED_PHASES else 1)

    def run_timeline(self, exchanges: Exchanges | None) -> Timeline:
        """The timeline of a step in the middle of a training."""
        traffic = Traffic(exchanges, self.setting) if exchanges is not None else None
        events = exchanges.events if exchanges is not None else ()
        timeline = Timeline(self.rates.asynchronous, self.setting.precision == "fp16", traffic)
        if self.rates.asynchronous:
            # The counted step starts with the host as far ahead as the step before left it.
            timeline.run(self.priced, events)
            timeline.clear_accounts()
        timeline.run(self.priced, events)
        return timeline

    def split_seconds(self, timeline: Timeline) -> list[tuple[Part, tuple[str, ...]]]:
        """The seconds of all micro-batches by part; beside a part its operation's name and path,
        where the account holds them."""
        parts = [
            (Part(phase, kind, bound, self._scale(phase, seconds)), tuple(operation))
            for (phase, kind, bound, *operation), seconds in timeline.accounts.items()
        ]
        for (phase, micro_batch), seconds in timeline.exposed.items():
            exposed = self.repeats(phase, micro_batch) * seconds
            parts.append((Part(phase, COLLECTIVE_WAIT, DEVICE_LINK, exposed), ()))
        return parts

    def predict(self, exchanges: Exchanges | None) -> Throughput:
        """The throughput of a step in the middle of a training."""
        setting, rates = self.setting, self.rates
        timeline = self.run_timeline(exchanges)
        parts = [part for part, _ in self.split_seconds(timeline)]
        total = sum(part.seconds for part in parts)
        kind_seconds: dict[str, float] = defaultdict(float)
        for part in parts:
            kind_seconds[part.kind] += part.seconds
        host = sum(self._scale(phase, seconds) for phase, seconds in timeline.issuing.items())
        return Throughput(
            step_seconds=total,
            images_per_second=setting.images_per_device_step / total if total else 0.0,
            basis=rates.basis,
            uncertainty=rates.uncertainty_of(setting, kind_seconds, host),
            parts=tuple(parts),
            host_seconds=host,
            matrix_flops=sum(self._scale(*flops) for flops in self.matrix_flops.items()),
            launches=round(sum(self._scale(*launches) for launches in self.launches.items())),
            devices=setting.world_size,
            host_updates=setting.offload_optimizer != "none",
        )


def _is_graphed(setting: TrainSetting) -> bool:
    return setting.compile in GRAPH_MODES
