"""A second physics, which shares nothing with the prediction that a search begins with.

A device is a description: how fast each family of kernels is, and what a kernel, a launch and a
compile mode cost. The work of a step is counted here from the model's sizes, in closed form; no
ledger, no recorded step and no rate of the planner's is used. Shapes have cliffs: matrix products
run in waves of whole tiles, and rows that are no multiple of eight take longer. Ranges without
a source are assumptions, like those of tests/benchmarks/simulated_draws.py.

T tokens of a stage, C its channels, M its window's side, B batch.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from planner.core.schema import SwinConfig, TrainSetting
from planner.core.units import MIB
from planner.machine.hardware import Gpu, recognise_gpu
from tests.benchmarks.simulated_draws import Device, Pair, luck

Array = NDArray[np.float64]
Description = Mapping[str, float]
TILE = 128  # rows and columns of a matrix product's tile
KERNELS_SHARE = {"off": 1.0, "default": 0.35, "reduce-overhead": 0.35, "max-autotune": 0.3}
LAUNCHES_SHARE = {"off": 1.0, "default": 0.3, "reduce-overhead": 0.02, "max-autotune": 0.02}
# What stays of a block's activations, and how much of a forward is done again.
CHECKPOINTED = {
    "none": (1.0, 0.0), "selective": (0.55, 0.15), "blocks": (0.12, 1.0),
    "blocks:every-2": (0.55, 0.5), "stages:0": (0.6, 0.4), "stages:0,1": (0.45, 0.6),
    "stages": (0.3, 1.0),
}  # fmt: skip
RANGES: Mapping[str, tuple[float, float]] = {
    "matmul fp32": (0.5, 0.95), "matmul tf32": (0.3, 0.8), "matmul bf16": (0.25, 0.75),
    "matmul fp16": (0.25, 0.75),  # of the card's peaks
    "bandwidth": (0.5, 0.9),  # of the card's
    "passes": (14.0, 34.0),  # over T C, in a block's forward, of what is no matrix product
    "passes left": (0.3, 0.75),  # of them once compiled
    "scores": (3.0, 8.0),  # passes over the scores of eager attention
    "sdpa": (0.1, 0.5),  # its rate, of that of matrix products
    "kernels": (24.0, 48.0),  # of a block's forward, eager
    "kernel": (1.5e-6, 5e-6), "launch": (3e-6, 14e-6),  # seconds: the device's, the host's
    "backward": (1.7, 2.4),  # of a forward
    "compiled": (0.9, 1.1),  # and of that, by mode, the rate:
    "default": (1.0, 1.0), "reduce-overhead": (0.97, 1.03), "max-autotune": (0.97, 1.05),
    # Published steps refute that waves are felt in whole; up to three quarters the mean error of a
    # fit stays the same (fit_tiles.py). In fp32, 64 to 512 images of a Swin-T, which waves suit
    # alike, lie within 1% of a line on two cards (tests/search/test_simulated.py).
    "odd rows": (1.0, 1.2), "waves": (0.0, 0.75), "ripple": (0.0, 0.02),
    "bytes": (0.85, 1.15), "bytes compiled": (0.75, 1.1), "bytes held": (100, 700),  # MiB
    "optimizer passes": (6.0, 12.0), "fused optimizer": (0.4, 0.9),
    "emulated bf16": (1.0, 1.0), "compile": (20, 110), "tuning": (30, 120),
    "heat": (0.0, 0.0), "neighbours": (0.0, 0.0),
}  # fmt: skip
FAILURES = {
    "compile default": 0.05, "compile reduce-overhead": 0.1, "compile max-autotune": 0.1,
    "compiled checkpointing": 0.1, "adamw-fused": 0.04,
}  # fmt: skip


def describe(pair: Pair, seed: int, **given: tuple[float, float]) -> Device:
    """A device of a pair by a description drawn from RANGES, or from those that are `given`."""
    random = luck(pair, seed, "description")
    ranges = {**RANGES, **given}
    what = {name: float(random.uniform(*ends)) for name, ends in ranges.items()}
    gpu = recognise_gpu(pair.device.name, pair.device.total_bytes)
    ripple = {s: random.normal(0, what["ripple"]) for s in map(_without_optimizer, _settings(pair))}
    seconds, num_bytes = np.empty(len(pair.space)), np.empty(len(pair.space))
    for i, setting in enumerate(_settings(pair)):
        seconds[i] = _seconds(pair.model, setting, gpu, what)
        seconds[i] *= np.exp(ripple[_without_optimizer(setting)])
        num_bytes[i] = _bytes(pair.model, setting, what)
    near = (num_bytes > 0.97 * pair.budget_bytes) & (num_bytes <= pair.budget_bytes)
    broken = {part for part, share in FAILURES.items() if random.random() < share}
    compiling = {"off": 0.0, "default": what["compile"], "reduce-overhead": 1.1 * what["compile"],
                 "max-autotune": what["compile"] + what["tuning"]}  # fmt: skip
    return Device(
        pair=pair, seed=seed, seconds=np.where(near, 1.4 * seconds, seconds),
        num_bytes=num_bytes.astype(np.int64),
        refused=[_refusal(setting, broken) for setting in _settings(pair)],
        compile_seconds=compiling, startup_seconds=6.0, noise=0.012, disturbed=0.03,
        heat=what["heat"], neighbours=what["neighbours"],
    )  # fmt: skip


def _settings(pair: Pair) -> list[TrainSetting]:
    return [c.setting for c in pair.space.candidates]


def _without_optimizer(setting: TrainSetting) -> TrainSetting:
    return setting.model_copy(update={"optimizer": "adamw"})


def _refusal(setting: TrainSetting, broken: set[str]) -> str:
    parts = [f"compile {setting.compile}", setting.optimizer]
    if setting.compiles and setting.checkpointing != "none":
        parts.append("compiled checkpointing")
    return next((f"crashed: {part}" for part in parts if part in broken), "")


def _width(setting: TrainSetting, of_16_bits: float) -> float:
    """Bytes of an element, in the mean."""
    return 4 if setting.precision in ("fp32", "tf32") else of_16_bits


def _stages(model: SwinConfig) -> list[tuple[int, int, int, int]]:
    """(T, C, blocks, heads) of each stage."""
    side = model.image_size[0] // model.patch_size
    return [
        ((side >> i) ** 2, model.embed_dim << i, depth, heads)
        for i, (depth, heads) in enumerate(zip(model.depths, model.num_heads, strict=True))
    ]


def _window(model: SwinConfig) -> int:
    """Its tokens."""
    side = model.window_size
    return side**2 if isinstance(side, int) else side[0] * side[1]


def num_parameters(model: SwinConfig) -> float:
    """Of a block's four matrices (qkv 3 C², proj C², the MLP 8 C²); a merging of patches has 8 C²
    of the stage before it. Norms, biases and the head are left out."""
    stages = _stages(model)
    blocks = sum(depth * 12 * c**2 for _, c, depth, _ in stages)
    return float(blocks + sum(8 * c**2 for _, c, _, _ in stages[:-1]))


def _seconds(model: SwinConfig, setting: TrainSetting, gpu: Gpu, what: Description) -> float:
    """The device's or the host's, whichever is later, and the optimizer's step."""
    batch, mode = setting.batch_size, setting.compile
    rate, width = _matrix_rate(setting, gpu, what), _width(setting, 3)
    bandwidth = gpu.bandwidth * what["bandwidth"]
    passes = what["passes"] * (1.0 if mode == "off" else what["passes left"])
    forward = launches = 0.0
    for tokens, c, blocks, heads in _stages(model):
        products = 0.0
        for rows, columns in ((c, 3 * c), (c, c), (c, 4 * c), (4 * c, c)):
            flops = 2 * batch * tokens * rows * columns
            products += flops / (rate * _filled(batch * tokens, columns, gpu, what))
        window = _window(model)
        scores = batch * tokens * window * heads
        if setting.attention == "eager":
            attention = what["scores"] * scores * width / bandwidth
            attention += 4 * batch * tokens * window * c / rate
        else:
            attention = 4 * batch * tokens * window * c / (what["sdpa"] * rate)
        moving = passes * batch * tokens * c * width / bandwidth
        kernels = what["kernels"] * KERNELS_SHARE[mode]
        forward += blocks * (products + attention + moving + kernels * what["kernel"])
        launches += blocks * what["kernels"] * LAUNCHES_SHARE[mode] * what["launch"]
    times = 1 + what["backward"] + CHECKPOINTED[setting.checkpointing][1]
    busy = forward * times / (1.0 if mode == "off" else what["compiled"] * what[mode])
    if setting.precision in ("bf16", "pure-bf16"):
        busy *= what["emulated bf16"]
    updates = what["optimizer passes"] * 4 * num_parameters(model) / bandwidth
    if setting.optimizer_implementation == "fused":
        updates *= what["fused optimizer"]
    once = max(busy, launches * times)
    exposed = _exchange(model, setting, what) - what.get("hidden", 0.0) * (1 - 1 / times) * once
    return setting.accumulate * once + max(exposed, 0.0) + updates + 100 * what["launch"]


def _exchange(model: SwinConfig, setting: TrainSetting, what: Description) -> float:
    """Seconds of a ring's all-reduce of fp32 gradients, over a link of `link` bytes/s."""
    if setting.world_size == 1:
        return 0.0
    return 8 * (1 - 1 / setting.world_size) * num_parameters(model) / what["link"]


def _matrix_rate(setting: TrainSetting, gpu: Gpu, what: Description) -> float:
    precision = setting.precision.removeprefix("pure-")
    peak: float | None = getattr(gpu, f"{precision}_flops")
    rate = (peak or gpu.fp32_flops) * what[f"matmul {precision}"]
    return rate / (what["odd rows"] if setting.batch_size % 8 else 1.0)


def _filled(rows: int, columns: int, gpu: Gpu, what: Description) -> float:
    """The share of the multiprocessors that the waves of a product's tiles keep busy, so far as the
    device feels it."""
    waves = -(-rows // TILE) * -(-columns // TILE) / (gpu.num_sms or 80)
    return float(1 - what["waves"] * (1 - waves / np.ceil(waves)))


def _bytes(model: SwinConfig, setting: TrainSetting, what: Description) -> float:
    """Weights, gradients and two moments in fp32, and of each block about 17 T C and, eager, the
    scores twice; one block at work of what is checkpointed."""
    width = _width(setting, 2.4)
    blocks = []
    for tokens, c, depth, heads in _stages(model):
        scores = 2 * heads * _window(model) if setting.attention == "eager" else 0
        blocks.append((depth, setting.batch_size * tokens * (17 * c + scores) * width))
    kept, _ = CHECKPOINTED[setting.checkpointing]
    working = max(size for _, size in blocks) if kept < 1 else 0.0
    activations = kept * sum(depth * size for depth, size in blocks) + working
    activations *= what["bytes"] * (1.0 if setting.compile == "off" else what["bytes compiled"])
    state = 16 if setting.world_size == 1 else 20  # DDP's buckets hold the gradients once more
    return state * num_parameters(model) + activations + what["bytes held"] * MIB
