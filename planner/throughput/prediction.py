"""Ledger + a device's rates -> seconds.

Each operation takes what its FLOPs or its bytes need, whichever is more (the roofline), after a
fixed start. The host issues operations ahead of the device: the device waits where the host is
late, which is what bounds small batches. `torch.compile` fuses chains of pointwise operations and
costs the host less; CUDA graphs cost it next to nothing. Imports no torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from planner.core.schema import Model
from planner.core.schema.setting import GRAPH_MODES, TrainSetting
from planner.ledger.ledger import (
    COMPILED_CALL,
    IN_BACKWARD,
    RECORDED_MICRO_BATCHES,
    Computed,
    Exchanged,
    Ledger,
    Sent,
)
from planner.machine.hardware.gpu import Gpu
from planner.memory.compiled import FUSED_PREFIX, is_kernel
from planner.throughput.rates import MATRIX_KINDS, DeviceRates, rates_for
from planner.throughput.result import (
    BANDWIDTH,
    BETWEEN,
    LINK,
    MATRIX_UNITS,
    OTHERS,
    STARTS,
    Part,
    Spent,
    Throughput,
)
from planner.throughput.timeline import (
    Communication,
    Exchanges,
    Priced,
    Timeline,
    Traffic,
    after_regions,
    collective_seconds,
    exchanges_of,
    sent_bytes,
)

Operation = tuple[str, Computed]  # (phase, operation), as `Ledger.operations` yields them

# Of these the name tells the kernel: batched or not, with a bias or not, pooling.
_NAMED_KINDS = frozenset(("matmul", "attention", "reduction"))
_OVER_LISTS = ("_foreach_", "_fused_adam", "_fused_sgd")
# A call of torch.compile's code for one weight, its guards looked at: measured with torch 2.13 and
# torchao 0.18 on one core of a Xeon, 2026-11-22, as the time of AdamW8bit.step of 50 small weights.
_COMPILED_CALL_SECONDS = 400e-6


def step_time(
    ledger: Ledger, setting: TrainSetting, rates: DeviceRates, exchanges: Exchanges | None = None
) -> Throughput:
    """One optimizer step as it was recorded."""
    recorded = min(setting.accumulate, RECORDED_MICRO_BATCHES)
    return predict_step(ledger.operations(), rates, setting, recorded, exchanges)


def step_costs(
    ledger: Ledger, model: Model, setting: TrainSetting, gpu: Gpu, link: str | None
) -> tuple[Spent, ...]:
    """The seconds of `step_time` on a GPU, by operation and the module it ran in: they sum to the
    same.

    What the device waits for has no operation: its `name` and `path` are "". Of a compiled step
    the operations are the kernels that they are fused to, in the module of their first.
    """
    recorded = min(setting.accumulate, RECORDED_MICRO_BATCHES)
    rates, exchanges = rates_for(gpu, model), exchanges_of(ledger, setting, gpu, link)
    step, kernels, events = prepared(ledger.operations(), rates, setting, recorded, exchanges)
    step.operations = [
        priced._replace(account=(*priced.account, operation.name, operation.path))
        for priced, (_, operation) in zip(step.operations, kernels, strict=True)
    ]
    return tuple(Spent(*part, *what) for part, what in step.spent(step.line(events)))


def predict_step(
    operations: Iterable[Operation],
    rates: DeviceRates,
    setting: TrainSetting,
    recorded_accumulate: int | None = None,
    exchanges: Exchanges | None = None,
) -> Throughput:
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


def _together(step: _Step, exchanges: Exchanges, alone: Throughput) -> Throughput:
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
    elif operation.kind in MATRIX_KINDS:
        rate = rates.matrix_rate(phase, operation, setting.precision)
        busy = operation.num_bytes / rates.moving_rate(operation, setting.memory_format)
        if operation.flops / rate >= busy:
            busy, bound = operation.flops / rate, MATRIX_UNITS
    elif setting.compile != "off" and rates.compiled_bandwidth is not None:
        busy = operation.num_bytes / rates.compiled_bandwidth
    else:
        busy = operation.num_bytes / rates.moving_rate(operation, setting.memory_format)
    return busy + start, STARTS if start > busy else bound


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
        if operation.kind in MATRIX_KINDS:
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

    def line(self, exchanges: Exchanges | None) -> Timeline:
        """A step in the middle of a training, run."""
        traffic = Traffic(exchanges, self.setting) if exchanges is not None else None
        events = exchanges.events if exchanges is not None else ()
        line = Timeline(self.rates.asynchronous, self.setting.precision == "fp16", traffic)
        if self.rates.asynchronous:
            # The step counted starts with the host as far ahead as it got.
            line.run(self.operations, events)
            line.begin()
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

    def time(self, exchanges: Exchanges | None) -> Throughput:
        """Of a step in the middle of a training."""
        setting, rates = self.setting, self.rates
        line = self.line(exchanges)
        parts = [part for part, _ in self.spent(line)]
        total = sum(part.seconds for part in parts)
        kind_seconds: dict[str, float] = defaultdict(float)
        for part in parts:
            kind_seconds[part.kind] += part.seconds
        host = sum(self._scaled(p, s) for p, s in line.issuing.items())
        return Throughput(
            step_seconds=total,
            images_per_second=setting.batch_size * setting.accumulate / total if total else 0.0,
            basis=rates.basis,
            uncertainty=rates.uncertainty_of(setting, kind_seconds, host),
            parts=tuple(parts),
            host_seconds=host,
            matrix_flops=sum(self._scaled(p, flops) for p, flops in self.matrix_flops.items()),
            launches=round(sum(self._scaled(p, n) for p, n in self.launches.items())),
            devices=setting.world_size,
            host_updates=setting.offload_optimizer != "none",
        )


def _is_graphed(setting: TrainSetting) -> bool:
    return setting.compile in GRAPH_MODES


# What a compiled step runs in place of its operations: fused kernels, updates after backward.

_FUSIBLE_KINDS = frozenset(("pointwise", "reduction", "copy"))
# A pointwise operation inside a chain reads and writes equally much. Fused, the read vanishes and
# the write stays only where backward needs it: between 0 and 1/2 of its bytes remain (derived);
# the middle is assumed.
_FUSED_BYTES_KEPT = 0.25


def with_updates_last(
    operations: list[tuple[str, Any]], setting: TrainSetting
) -> list[tuple[str, Any]]:
    """Updates in backward follow that of a compiled model: it hands over all gradients as it
    returns."""
    is_whole = setting.compile != "off" and setting.compile_scope == "model"
    if not setting.updates_beside or not is_whole:
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
        fusible = operation[1] in _FUSIBLE_KINDS and region is not None
        fusible = fusible and not operation[0].startswith(FUSED_PREFIX)  # fused already
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


def fuse_between(
    operations: Sequence[Operation], regions: Sequence[str | None], exchanges: Sequence[Exchanged]
) -> tuple[list[Operation], list[str | None], tuple[Exchanged, ...]]:
    """`fuse_operations` of what lies between exchanges, with their places among the fused."""
    fused: list[Operation] = []
    where: list[str | None] = []
    moved = []
    done = 0
    for exchange in exchanges:
        part = slice(done, exchange.place)
        kernels, their = fuse_operations(operations[part], regions[part])
        fused += kernels
        where += their
        done = exchange.place
        moved.append(exchange._replace(place=len(fused)))
    rest = fuse_operations(operations[done:], regions[done:])
    return [*fused, *rest[0]], [*where, *rest[1]], tuple(moved)


def _fuse(chain: Sequence[Computed]) -> Computed:
    if len(chain) == 1:
        return chain[0]
    _, kinds, dtypes, flops, sizes, _, paths = zip(*chain, strict=True)
    most = max(sizes)
    largest = sizes.index(most)
    return Computed(
        name=f"fused_{len(chain)}",
        kind=kinds[largest],
        dtype=dtypes[largest],
        flops=sum(flops),
        num_bytes=most + int(_FUSED_BYTES_KEPT * (sum(sizes) - most)),
        kernels=max(1, kinds.count("reduction")),
        path=paths[0],
    )


# Which operations of a step are compiled, and in which compiled region. Imports no torch.

COMPILED_PHASES = frozenset(("forward", "backward"))  # the optimizer's step is not compiled
WHOLE = ""  # the region that is the model, and what the step does around it


def regions_of(
    operations: Sequence[tuple[str, Computed]], setting: TrainSetting
) -> list[str | None]:
    """Of each of `operations` (phase, operation) the compiled region that runs it, or None.

    Compiled block by block, a region is a block. Recorded, its kernels are known by their names;
    of an eager step in place of a compiled one, they are the operations of modules within numbered
    ones: of the blocks in stages, where most are so deep.
    """
    if setting.compile == "off":
        return [None] * len(operations)
    if setting.compile_scope == "model":
        return [WHOLE if phase in COMPILED_PHASES else None for phase, _ in operations]
    is_known = any(is_kernel(operation.name) for _, operation in operations)
    paths = {operation.path: _numbers(operation.path) for _, operation in operations}
    numbered = [len(paths[op.path]) for _, op in operations if paths[op.path]]
    is_deep = sum(count > 1 for count in numbered) > 0.75 * len(numbered)
    depth = 2 if is_deep else 1
    block = {path: _block(path, found, depth) for path, found in paths.items()}
    return [
        block[operation.path]
        if phase in COMPILED_PHASES and is_kernel(operation.name) >= is_known
        else None
        for phase, operation in operations
    ]


def _numbers(path: str) -> list[int]:
    """Where in a path, counted in its parts, the numbers are."""
    return [place for place, part in enumerate(path.split(".")) if part.isdecimal()]


def _block(path: str, numbers: Sequence[int], depth: int) -> str | None:
    """`layers.0.blocks.1` of `layers.0.blocks.1.mlp.fc1` at depth 2, None of what lies above."""
    if len(numbers) < depth:
        return None
    return ".".join(path.split(".")[: numbers[depth - 1] + 1])


def entries(phases: Iterable[str], regions: Iterable[str | None]) -> list[bool]:
    """Whether a compiled region is entered with an operation: it is another than before."""
    found, previous = [], None
    for here in zip(phases, regions, strict=True):
        found.append(here[1] is not None and here != previous)
        previous = here
    return found
