"""Devices that do not exist, each with a physics of its own, to judge the search by.

A draw says how fast a device does each kind of work, what compiling gains, what a setting takes of
memory and what fails; the planner meets it with its own unaltered prior. Every range below is an
assumption, about as wide as published measurements differ from datasheets: a draw judges the search
and says nothing of any device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.core.schema import DeviceInfo, MeasurementRecord, SwinConfig, TrainSetting
from planner.core.units import GIB, MIB
from planner.estimation.device_estimator import DeviceEstimator
from planner.estimation.estimate import read_resolved
from planner.libraries.names import resolve_model
from planner.machine.hardware import recognise_gpu
from planner.throughput.rates import DeviceRates, rates_for
from search.loop.space import Candidate, Space, make_space
from search.loop.surrogate.prior import (
    AGAIN_SHARE,
    ALIKE_SHARE,
    Prior,
    estimated_prior,
    graph_of,
    kernels_of,
)
from tests.benchmarks.simulated_physics import (
    MATRIX_KINDS,
    RECORDED,
    Array,
    Physics,
    record_step,
    step_seconds,
)

HEADROOM = 0.05  # of the card, left free: `planner tune`'s default
DTYPE_PEAKS = {"float32": "fp32_flops", "tf32": "tf32_flops", "bfloat16": "bf16_flops",
               "float16": "fp16_flops"}  # fmt: skip
COMPILED = ("default", "reduce-overhead", "max-autotune")
TIMED_SECONDS, TIMED_STEPS, WARM_STEPS, NUM_SAMPLES = 3.0, 5, 2, 9
WARM_SECONDS = 120.0  # in which a card gets as warm as it will, by two thirds
SAMPLE_SD = 0.003  # of the samples of one probe; probes differ by a device's `noise`


def _card(name: str, gib: int, capability: tuple[int, int]) -> DeviceInfo:
    return DeviceInfo(kind="cuda", name=name, total_bytes=gib * GIB, capability=capability)


A100 = _card("NVIDIA A100-SXM4-80GB", 80, (8, 0))
H100 = _card("NVIDIA H100 80GB HBM3", 80, (9, 0))
RTX_3090 = _card("NVIDIA GeForce RTX 3090", 24, (8, 6))
RTX_4090 = _card("NVIDIA GeForce RTX 4090", 24, (8, 9))
V100 = _card("Tesla V100-SXM2-32GB", 32, (7, 0))
T4 = _card("Tesla T4", 15, (7, 5))
PAIRS: Mapping[str, tuple[str, DeviceInfo]] = {
    "a100-swin-t": ("native:swin_tiny", A100),
    "a100-swin-b": ("timm:swin_base_patch4_window7_224", A100),
    "h100-swinv2-t": ("timm:swinv2_tiny_window8_256", H100),
    "h100-swin-l-384": ("timm:swin_large_patch4_window12_384", H100),
    "3090-swin-t": ("native:swin_tiny", RTX_3090),
    "3090-swin-b": ("timm:swin_base_patch4_window7_224", RTX_3090),
    "4090-swin-l-384": ("timm:swin_large_patch4_window12_384", RTX_4090),
    "v100-swin-b": ("timm:swin_base_patch4_window7_224", V100),
    "t4-swin-t": ("native:swin_tiny", T4),
}


@dataclass(frozen=True)
class Pair:
    """A model on a card as the planner sees it before any probe; the same for every draw."""

    name: str
    model: SwinConfig
    device: DeviceInfo
    space: Space
    prior: Prior
    budget_bytes: int


@lru_cache(maxsize=1)
def make_pair(name: str) -> Pair:
    """The pair of that name, over `planner tune`'s default space."""
    return narrow_pair(name)


def narrow_pair(name: str, **narrowed: Any) -> Pair:
    """The pair of that name, over what `make_space` makes of `narrowed`."""
    title, device = PAIRS[name]
    model = resolve_model(title)
    assert isinstance(model, SwinConfig)
    space = make_space(model, device, **narrowed)
    budget = int(device.total_bytes * (1 - HEADROOM))
    prior = estimated_prior(space, model, device, DeviceEstimator(device))
    return Pair(name, model, device, space, prior, budget)


@dataclass(frozen=True)
class Device:
    """What is true of one drawn device, by candidate of its pair's space. `refused` is why a
    candidate does not run, "" where it does; `disturbed` how often a probe is throttled, `heat`
    what a device loses that has worked for minutes, `neighbours` how often others run on it."""

    pair: Pair
    seed: int
    seconds: Array
    num_bytes: NDArray[np.int64]
    refused: Sequence[str]
    compile_seconds: Mapping[str, float]
    startup_seconds: float
    noise: float
    disturbed: float
    heat: float = 0.0
    neighbours: float = 0.0

    def rates(self) -> Array:
        """True images/s of each candidate, 0 where it does not run within the budget."""
        images = np.array([c.setting.images_per_device_step for c in self.pair.space.candidates])
        runs = np.array([not why for why in self.refused])
        return np.where(runs & (self.num_bytes <= self.pair.budget_bytes), images / self.seconds, 0)


def luck(pair: Pair, seed: int, of: str) -> np.random.Generator:
    """What no other pair, seed or use of it shares."""
    return np.random.default_rng([seed, *f"{pair.name}: {of}".encode()])


def draw_device(pair: Pair, seed: int) -> Device:
    """One device of a pair: the same for the same seed."""
    random = luck(pair, seed, "device")
    physics = _draw_physics(pair.device, random)
    seconds = _draw_seconds(pair, physics, random)
    num_bytes = _draw_bytes(pair, random)
    seconds = _thrash(pair, seconds, num_bytes, random)
    default = random.uniform(20, 110)
    return Device(
        pair=pair,
        seed=seed,
        seconds=seconds,
        num_bytes=num_bytes,
        refused=_draw_failures(pair, random),
        compile_seconds={
            "off": 0.0,
            "default": default,
            "reduce-overhead": default * random.uniform(0.85, 1.25),
            "max-autotune": max(random.uniform(60, 180), default),
        },
        startup_seconds=4.0,
        noise=random.uniform(0.005, 0.02),
        disturbed=0.03,
    )


def _draw_physics(device: DeviceInfo, random: np.random.Generator) -> Physics:
    """Shares of the datasheet's peaks, and costs of host and kernels about the planner's."""
    gpu = recognise_gpu(device.name, device.total_bytes)
    planners = rates_for(gpu)
    peaks = {dtype: getattr(gpu, name) for dtype, name in DTYPE_PEAKS.items()}
    matmul = {d: peak * random.uniform(0.5, 1.0) for d, peak in peaks.items() if peak is not None}
    share = dict(planners.kind_share)
    share["attention"] = random.uniform(0.1, 0.6)
    share["conv"] = random.uniform(0.2, 0.7)
    bandwidth = {
        kind: gpu.bandwidth * (random.uniform(0.5, 0.9) if kind in MATRIX_KINDS else
                               random.uniform(0.35, 0.9))
        for kind in share
    }  # fmt: skip
    # The planner's host costs were measured on a slow one, a virtual server.
    host, start = _log_uniform(random, 0.2, 1.7), _log_uniform(random, 0.7, 3)
    rates = DeviceRates(
        name=device.name,
        basis="drawn",
        matmul_flops=matmul,
        bandwidth=gpu.bandwidth,
        kind_share=share,
        kernel_seconds=planners.kernel_seconds * start,
        graph_kernel_seconds=planners.graph_kernel_seconds * start,
        host_seconds={phase: s * host for phase, s in planners.host_seconds.items()},
        launch_seconds=planners.launch_seconds * host,
        compiled_launch_seconds=planners.compiled_launch_seconds * host,
        graph_seconds=planners.graph_seconds * host,
    )
    return Physics(rates, bandwidth, fused_kept=random.uniform(0.1, 0.6))


def _log_uniform(random: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(random.uniform(np.log(low), np.log(high))))


def _draw_seconds(pair: Pair, physics: Physics, random: np.random.Generator) -> Array:
    """Seconds of a step of each candidate: the physics, what a compile mode gains beyond it, and
    what no physics explains (a batch's ripple, an arm's own)."""
    compiled = np.exp(random.normal(0, 0.06))
    # As published of steps that do not wait for their host (docs/tuning.md has the sources).
    speed = {
        "off": 1.0,
        "default": compiled,
        "reduce-overhead": compiled * random.uniform(0.97, 1.03),
        "max-autotune": compiled * random.uniform(0.97, 1.05),
    }
    # Assumed; in fp32, 64 to 512 images lie within 1% of a line (tests/search/test_simulated.py).
    ripple = random.uniform(0.01, 0.05)
    common = {p: _ripple(pair.space, random) for p in pair.space.choices["precision"]}
    own: dict[TrainSetting, tuple[float, Array]] = {}
    seconds = np.empty(len(pair.space))
    for setting, at in _by_arm(pair.space).items():
        batches = np.array([float(pair.space.candidates[i].setting.batch_size) for i in at])
        plain = setting.model_copy(update={"compile": "off", "batch_size": RECORDED[0]})
        _, plain = read_resolved(pair.model, plain, None, {})
        step = record_step(pair.model, plain).at(batches)
        arm = setting.model_copy(update={"optimizer": setting.optimizer_family})
        if arm not in own:
            own[arm] = random.normal(0, 0.025), _ripple(pair.space, random)
        rungs = np.searchsorted(_rungs(pair.space), batches)
        wave = 0.7 * common[setting.precision][rungs] + 0.3 * own[arm][1][rungs]
        factor = np.exp(ripple * wave + own[arm][0]) / speed[setting.compile]
        seconds[at] = step_seconds(step, physics, setting) * factor
    return seconds


def _ripple(space: Space, random: np.random.Generator) -> Array:
    return random.uniform(-1, 1, len(_rungs(space)))


def _rungs(space: Space) -> Array:
    return np.unique([float(c.setting.batch_size) for c in space.candidates])


def _by_arm(space: Space) -> dict[TrainSetting, list[int]]:
    """The positions of each arm's candidates, by the arm's setting at batch 1."""
    found: dict[TrainSetting, list[int]] = {}
    for i, c in enumerate(space.candidates):
        found.setdefault(c.setting.model_copy(update={"batch_size": 1}), []).append(i)
    return found


def _draw_bytes(pair: Pair, random: np.random.Generator) -> NDArray[np.int64]:
    """The planner's figure, off by a factor of each arm's, one of each compile mode's, and what
    the device holds besides."""
    extra = random.uniform(0, 600) * MIB
    factor = {mode: random.uniform(0.8, 1.25) for mode in COMPILED} | {"off": 1.0}
    off = np.array([factor[c.setting.compile] for c in pair.space.candidates])
    for at in _by_arm(pair.space).values():
        off[at] *= random.uniform(0.97, 1.06)
    return (np.array([g.num_bytes for g in pair.prior.guesses]) * off + extra).astype(np.int64)


def _thrash(
    pair: Pair, seconds: Array, num_bytes: NDArray[np.int64], random: np.random.Generator
) -> Array:
    """Slower close to the limit, where the allocator gives back and asks again."""
    limit = random.choice([pair.device.total_bytes, pair.budget_bytes])
    close = (num_bytes > 0.97 * limit) & (num_bytes <= limit)
    return np.where(close, seconds / (1 - random.uniform(0.2, 0.6)), seconds)


def _draw_failures(pair: Pair, random: np.random.Generator) -> list[str]:
    """Why each candidate does not run: what it shares with others fails, or its arm."""
    settings = [c.setting for c in pair.space.candidates]
    why = [""] * len(settings)

    def fail(share: float, name: str, of: Sequence[bool]) -> None:
        how = random.choice(["unsupported", "crashed"])
        if random.random() < share:
            for i in np.flatnonzero(of):
                why[i] = why[i] or f"{how}: {name}"

    fail(0.03, "no compiler", [s.compile != "off" for s in settings])
    for mode, share in zip(COMPILED, (0.05, 0.12, 0.12), strict=True):
        fail(share, f"compile {mode}", [s.compile == mode for s in settings])
    both = [s.compile != "off" and s.checkpointing != "none" for s in settings]
    fail(0.15, "compiled checkpointing", both)
    fused = [s.optimizer_implementation == "fused" for s in settings]
    fail(0.04, "fused optimizer", fused)
    for arm, at in _by_arm(pair.space).items():
        mine = np.zeros(len(settings), dtype=bool)
        mine[at] = True
        fail(0.02, f"this arm ({arm.precision}, {arm.compile})", mine.tolist())
    return why


class SimulatedProber:
    """Probes a drawn device, as a table would answer: its records cost the seconds they say."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.random = luck(device.pair, device.seed, "probes")
        self.worked = 0.0  # seconds
        self.cached: set[object] = set()  # what was compiled
        self.cached_kernels: set[object] = set()

    def probe(self, candidate: Candidate) -> MeasurementRecord:
        device, space = self.device, self.device.pair.space
        index = space.index(candidate.setting)
        assert index is not None
        compiling = device.compile_seconds[candidate.setting.compile]
        compiling *= float(np.exp(self.random.normal(0, 0.05)))
        graph = graph_of(candidate.setting, space.axes)
        kernels = kernels_of(candidate.setting, space.axes)
        if graph in self.cached:
            compiling *= AGAIN_SHARE
        elif kernels in self.cached_kernels:
            compiling -= (1 - ALIKE_SHARE) * min(compiling, device.compile_seconds["default"])
        base = MeasurementRecord(
            model=device.pair.model, setting=candidate.setting, device=device.pair.device,
            versions={"simulated": "not measured"}, date="", status="crashed",
            probe_seconds=device.startup_seconds,
        )  # fmt: skip
        refused = device.refused[index]
        if refused:
            status, _, message = refused.partition(": ")
            spent = device.startup_seconds + compiling * self.random.uniform(0.2, 1.0)
            changes = {"status": status, "message": message, "probe_seconds": spent}
            return base.model_copy(update=changes)
        self.cached.add(graph)
        self.cached_kernels.add(kernels)
        num_bytes = int(device.num_bytes[index])
        if num_bytes > device.pair.device.total_bytes:
            spent = device.startup_seconds + compiling
            return base.model_copy(update={"status": "out_of_memory", "probe_seconds": spent})
        return self._measured(base, float(device.seconds[index]), num_bytes, compiling)

    def _hindered(self, seconds: float, flags: tuple[str, ...]) -> tuple[float, tuple[str, ...]]:
        """By what the device did before, and by others."""
        lost = self.device.heat * (1 - np.exp(-self.worked / WARM_SECONDS))
        if lost > 0.05:
            flags = (*flags, "throttled: sw_thermal_slowdown")
        if self.device.neighbours and self.random.random() < self.device.neighbours:
            lost = 1 - (1 - lost) * self.random.uniform(0.7, 0.95)
            flags = (*flags, "other processes on the GPU hold 2.0 GiB")
        return seconds / (1 - lost), flags

    def _measured(
        self, base: MeasurementRecord, true_seconds: float, num_bytes: int, compiling: float
    ) -> MeasurementRecord:
        random = self.random
        flags: tuple[str, ...] = ()
        seconds = true_seconds * float(np.exp(random.normal(0, self.device.noise)))
        if random.random() < self.device.disturbed:
            seconds /= 1 - random.uniform(0.05, 0.3)
            flags = ("throttled: hw_thermal_slowdown",)
        seconds, flags = self._hindered(seconds, flags)
        samples = seconds * np.exp(random.normal(0, SAMPLE_SD, NUM_SAMPLES))
        spent = max(TIMED_SECONDS, TIMED_STEPS * seconds) + WARM_STEPS * seconds
        self.worked += spent + base.probe_seconds
        images = base.setting.images_per_device_step
        changes = {
            "status": "measured", "step_seconds": tuple(map(float, samples)), "flags": flags,
            "images_per_second": images / float(np.median(samples)), "device_bytes": num_bytes,
            "peak_allocated_bytes": num_bytes, "compile_seconds": compiling or None,
            "probe_seconds": base.probe_seconds + compiling + spent,
        }  # fmt: skip
        return base.model_copy(update=changes)
