"""A training step's time on a device of any physics, for many batches at once.

`predict_step` (planner.throughput.prediction), vectorised over the batch, with a bandwidth of each
kind of kernel, a fusion and matmuls that are a device's own. With the planner's rates it gives the
planner's seconds (tests/search/test_simulated.py). n operations of a step, B batches.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.core.schema import SwinConfig, TrainSetting
from planner.estimation.estimate import read_resolved
from planner.estimation.ledgers import step_ledger
from planner.ledger.ledger import Computed, Operation
from planner.throughput.prediction import is_over_list, mark_recomputed
from planner.throughput.rates import DeviceRates

Array = NDArray[np.float64]
Labels = NDArray[np.str_]

RECORDED = (8, 16)  # two batches: what an operation does is affine in the batch
MATRIX_KINDS = ("matmul", "conv", "attention")
FUSIBLE_KINDS = ("pointwise", "reduction", "copy")
COMPILED_PHASES = ("forward", "backward")
GRAPH_MODES = ("reduce-overhead", "max-autotune")


@dataclass(frozen=True)
class Physics:
    """What a device does in a second, and what it spends besides. `bandwidth` is bytes/s by kind of
    kernel, `fused_kept` the share of the smaller operations' bytes that a fused chain still moves.
    """

    rates: DeviceRates
    bandwidth: Mapping[str, float]
    fused_kept: float


def planners_physics(rates: DeviceRates) -> Physics:
    """The planner's own beliefs, in these terms."""
    bandwidth = {
        kind: rates.bandwidth * (1.0 if kind in MATRIX_KINDS else share)
        for kind, share in rates.kind_share.items()
    }
    bandwidth["conv"] *= rates.convolution_bandwidth_share
    return Physics(rates, bandwidth, fused_kept=0.25)


@dataclass(frozen=True)
class Operations:
    """The operations of a step, in order. Labels and `kernels` are [n], what they do [n, B]."""

    phases: Labels
    kinds: Labels
    dtypes: Labels
    hosts: Labels
    kernels: Array
    flops: Array
    num_bytes: Array


@dataclass(frozen=True)
class Recorded:
    """An eager step at any batch: flops and bytes are `base + batch * slope`, each [n]."""

    phases: Labels
    kinds: Labels
    dtypes: Labels
    hosts: Labels
    kernels: Array
    flops: tuple[Array, Array]
    num_bytes: tuple[Array, Array]

    def at(self, batches: Array) -> Operations:
        flops, num_bytes = (
            base[:, None] + slope[:, None] * batches for base, slope in (self.flops, self.num_bytes)
        )
        labels = self.phases, self.kinds, self.dtypes, self.hosts
        return Operations(*labels, self.kernels, flops, num_bytes)


@lru_cache(maxsize=200)
def record_step(model: SwinConfig, setting: TrainSetting) -> Recorded:
    """The operations of an eager `setting`, whatever its batch."""
    found = []
    for batch in RECORDED:
        config, chosen = read_resolved(model, setting, None, {"batch_size": batch})
        assert isinstance(config, SwinConfig)
        found.append(list(step_ledger(config, chosen).operations()))
    small = found[0]
    assert len(small) == len(found[1]), "a step's operations differ between batches"

    def affine(quantity: str) -> tuple[Array, Array]:
        low, high = (np.array([float(getattr(o, quantity)) for _, o in s]) for s in found)
        slope = (high - low) / (RECORDED[1] - RECORDED[0])
        return low - RECORDED[0] * slope, slope

    return Recorded(
        phases=np.array([phase for phase, _ in small]),
        kinds=np.array([o.kind for _, o in small]),
        dtypes=np.array([o.dtype for _, o in small]),
        hosts=np.array(list(_hosts(small, setting))),
        kernels=np.array([float(o.kernels) for _, o in small]),
        flops=affine("flops"),
        num_bytes=affine("num_bytes"),
    )


def _hosts(operations: list[Operation], setting: TrainSetting) -> Iterator[str]:
    """What each costs the host, by the name that `DeviceRates.host_seconds` has for it."""
    again = mark_recomputed(operations, [None] * len(operations))
    for (phase, operation), is_again in zip(operations, again, strict=True):
        if is_over_list(operation):
            yield "list"
        else:
            yield "recomputed" if is_again and setting.checkpointing != "none" else phase


def step_seconds(operations: Operations, physics: Physics, setting: TrainSetting) -> Array:
    """[B]: the time of a steady step of eager `operations`, run as `setting` says, on a device
    that waits for its host while the host runs ahead."""
    if setting.compile != "off":
        operations = fuse(operations, physics.fused_kept)
    busy = _busy(operations, physics, setting)
    issue = _issue(operations, physics.rates, setting)
    # GradScaler asks the device for infinities before the optimizer's step.
    parts = _split(operations.phases) if setting.precision == "fp16" else [slice(None)]
    ends = []
    host, device = np.zeros(busy.shape[1]), np.zeros(busy.shape[1])
    for _ in range(2):  # the second begins with the host as far ahead as it got
        for part in parts:
            if part.start:
                host = np.maximum(host, device)
            host, device = _advance(host, device, issue[part], busy[part])
        ends.append(device)
    return np.asarray(ends[1] - ends[0])


def fuse(operations: Operations, kept: float) -> Operations:
    """Chains of pointwise, reduction and copy operations of one compiled phase as one each: all of
    the largest's bytes, `kept` of the others', a kernel per reduction and at least one."""
    phases, kinds = operations.phases, operations.kinds
    fusible = np.isin(kinds, FUSIBLE_KINDS) & np.isin(phases, COMPILED_PHASES)
    joins = np.zeros(len(kinds), dtype=bool)
    joins[1:] = fusible[1:] & fusible[:-1] & (phases[1:] == phases[:-1])
    starts = np.flatnonzero(~joins)
    total = np.add.reduceat(operations.num_bytes, starts)
    largest = np.maximum.reduceat(operations.num_bytes, starts)
    ends = np.append(starts[1:], len(kinds))
    chains = zip(starts, ends, strict=True)
    leaders = [a + int(operations.num_bytes[a:b, -1].argmax()) for a, b in chains]
    reductions = np.add.reduceat((kinds == "reduction").astype(float), starts)
    alone = ends - starts == 1
    kernels = np.where(alone, operations.kernels[starts], np.maximum(reductions, 1.0))
    return replace(
        operations,
        phases=phases[starts],
        kinds=kinds[leaders],
        dtypes=operations.dtypes[leaders],
        hosts=operations.hosts[leaders],
        kernels=kernels,
        flops=np.add.reduceat(operations.flops, starts),
        num_bytes=largest + kept * (total - largest),
    )


def _busy(operations: Operations, physics: Physics, setting: TrainSetting) -> Array:
    """[n, B]: the roofline, after the kernels' own start."""
    rates = physics.rates
    bandwidth = np.array([physics.bandwidth[k] for k in operations.kinds])[:, None]
    labels = zip(operations.phases, operations.kinds, operations.dtypes, strict=True)
    speed = np.array([_flops(*label, rates, setting.precision) for label in labels])
    graphed = np.isin(operations.phases, COMPILED_PHASES) & (setting.compile in GRAPH_MODES)
    start = np.where(graphed, rates.graph_kernel_seconds, rates.kernel_seconds)
    moving = operations.num_bytes / bandwidth
    computing = operations.flops / speed[:, None]
    return np.maximum(moving, computing) + (operations.kernels * start)[:, None]


def _flops(phase: str, kind: str, dtype: str, rates: DeviceRates, precision: str) -> float:
    """FLOP/s of an operation; no limit for what only moves bytes."""
    if kind not in MATRIX_KINDS:
        return float("inf")
    operation = Computed("", kind, dtype, 0, 0, 1, "")  # type: ignore[arg-type]
    return rates.matrix_rate(phase, operation, precision)


def _issue(operations: Operations, rates: DeviceRates, setting: TrainSetting) -> Array:
    """[n]: the host's seconds for each operation; a phase's graphs are replayed at its start."""
    phases, kernels, host = operations.phases, operations.kernels, rates.host_seconds
    seconds = np.array([host[what] for what in operations.hosts])
    further = np.array([
        host["list"] if what == "list" else host.get(f"{what} launch", rates.launch_seconds)
        for what in operations.hosts
    ])  # fmt: skip
    further[operations.hosts == "recomputed"] = 0.0
    seconds += np.maximum(kernels - 1, 0) * further
    if setting.compile == "off":
        return seconds
    compiled = np.isin(phases, COMPILED_PHASES)
    if setting.compile not in GRAPH_MODES:
        return np.where(compiled, kernels * rates.compiled_launch_seconds, seconds)
    seconds = np.where(compiled, 0.0, seconds)
    begins = np.append(True, phases[1:] != phases[:-1])
    return np.asarray(seconds + rates.graph_seconds * (begins & compiled))


def _split(phases: Labels) -> list[slice]:
    """Before and from the optimizer's step on."""
    at = int(np.argmax(phases == "optimizer"))
    return [slice(0, at), slice(at, None)]


def _advance(host: Array, device: Array, issue: Array, busy: Array) -> tuple[Array, Array]:
    """Both clocks [B] after operations that the host issues in turn: the device ends no sooner
    than the last of them would if it began when any one was issued."""
    issued = host + np.cumsum(issue)[:, None]
    done = np.cumsum(busy, axis=0)
    latest = (issued - done + busy).max(axis=0)
    return issued[-1], np.maximum(device, latest) + done[-1]
