"""Invented tables for tests: not measurements, but with the shape of them."""

from collections.abc import Callable, Sequence
from random import Random

from planner.core.schema import DeviceInfo, MeasurementRecord, SwinConfig, TrainSetting
from planner.core.units import GIB, MIB
from search.loop.space import candidate, make_space, space_of
from search.loop.surrogate.posterior import Posterior
from search.loop.surrogate.prior import (
    ESTIMATED_BYTES,
    ESTIMATED_SECONDS,
    Guess,
    Prior,
    generic_prior,
)
from search.probe.evidence import Contender
from tests.search.replays import Replay

MODEL = SwinConfig(name="invented")
BUDGET = 16 * GIB
GPU = DeviceInfo(kind="cuda", name="Test GPU", total_bytes=BUDGET, capability=(8, 0))
H100 = DeviceInfo(
    kind="cuda", name="NVIDIA H100 80GB HBM3", total_bytes=80 * GIB, capability=(9, 0)
)
SPEED = {"fp32": 1.0, "tf32": 0.62, "bf16": 0.42, "fp16": 0.44}
SAVED = {"fp32": 1.0, "tf32": 1.0, "bf16": 0.66, "fp16": 0.66}
WORK = {"none": 1.0, "blocks": 1.32, "stages": 1.33, "stages:0": 1.12, "stages:0,1": 1.2}
KEPT = {"none": 1.0, "blocks": 0.15, "stages": 0.5, "stages:0": 0.7, "stages:0,1": 0.6}
FUSED = {"off": 1.0, "default": 0.8, "reduce-overhead": 0.78, "max-autotune": 0.77}
COMPILE = {"off": None, "default": 45.0, "reduce-overhead": 55.0, "max-autotune": 260.0}


def true_seconds(setting: TrainSetting) -> float:
    """Seconds of a step: a fixed part, and per image the product of what each axis changes."""
    factor = SPEED[setting.precision] * WORK[setting.checkpointing] * FUSED[setting.compile]
    attention = 0.9 if setting.attention == "sdpa" else 1.0
    fixed = 0.012 if setting.optimizer == "adamw" else 0.010
    saturation = 1 + 2 / setting.batch_size
    return setting.accumulate * (setting.batch_size * factor * attention * saturation / 400 + fixed)


def true_bytes(setting: TrainSetting) -> int:
    attention = 0.85 if setting.attention == "sdpa" else 1.0
    per_image = 101 * MIB * SAVED[setting.precision] * KEPT[setting.checkpointing] * attention
    return int(1.1 * GIB + setting.batch_size * per_image)


def make_record(
    setting: TrainSetting, total_bytes: int = 16 * GIB, wobble: float = 0.0, seed: int = 0,
    probe_id: str = "", device: DeviceInfo = GPU, model: SwinConfig = MODEL,
) -> MeasurementRecord:  # fmt: skip
    """What a probe of this setting would have found; `wobble` is a log-normal disturbance."""
    random = Random(f"{setting}/{seed}")
    compile_seconds = COMPILE[setting.compile]
    common = {
        "probe_id": probe_id, "model": model, "setting": setting, "device": device,
        "versions": {"torch": "test"}, "date": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip
    if true_bytes(setting) > total_bytes:
        return MeasurementRecord(
            status="out_of_memory", message="CUDA out of memory", probe_seconds=6.0, **common
        )
    seconds = true_seconds(setting) * 2.718 ** random.gauss(0, wobble)
    samples = tuple(seconds * (1 + 0.002 * random.uniform(-1, 1)) for _ in range(11))
    return MeasurementRecord(
        status="measured", step_seconds=samples,
        images_per_second=setting.images_per_device_step / sorted(samples)[5],
        peak_allocated_bytes=true_bytes(setting), device_bytes=true_bytes(setting),
        compile_seconds=compile_seconds,
        probe_seconds=6.0 + (compile_seconds or 0.0) + sum(samples), **common,
    )  # fmt: skip


def slowed(
    record: MeasurementRecord, flag: str = "throttled: hw_thermal_slowdown", factor: float = 1.2
) -> MeasurementRecord:
    """As a probe that took longer would have left it."""
    seconds = tuple(s * factor for s in record.step_seconds)
    rate = (record.images_per_second or 0.0) / factor
    flags = (flag,) if flag else ()
    slower = {"step_seconds": seconds, "images_per_second": rate, "flags": flags}
    return record.model_copy(update=slower)


def failed(
    record: MeasurementRecord, status: str = "crashed", **fields: object
) -> MeasurementRecord:
    """As a probe that ended otherwise would have left it."""
    nothing = dict.fromkeys(("images_per_second", "device_bytes", "peak_allocated_bytes"))
    return record.model_copy(update={"status": status, "step_seconds": (), **nothing, **fields})


def told(posterior: Posterior, *records: MeasurementRecord) -> Posterior:
    for record in records:
        posterior.tell(candidate(record.setting), record)
    return posterior


def ran(records: Sequence[MeasurementRecord], budget: int | None = BUDGET) -> list[Contender]:
    """What a search has of these records, in the order of their first probes."""
    space = space_of(record.setting for record in records)
    posterior = told(Posterior(space, generic_prior(space, GPU), budget), *records)
    return [*posterior.contenders().values()]


SMALL = {
    "precision": ("fp32", "bf16"),
    "checkpointing": ("none", "blocks"),
    "compile": ("off", "default"),
    "attention": ("sdpa",),
    "optimizer": ("adamw",),
}


def invented_table(wobble: float = 0.01, restrict: dict | None = None) -> list[MeasurementRecord]:
    """An exhaustive table over batch × precision × checkpointing × compile."""
    batches = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    space = make_space(MODEL, GPU, restrict=restrict or SMALL, batch_sizes=batches)
    return [make_record(c.setting, wobble=wobble) for c in space.candidates]


def true_prior(
    replay: Replay, seconds: float = 1.0, num_bytes: float = 1.0,
    share: Callable[[TrainSetting], float] = lambda setting: 1.0,
) -> Prior:  # fmt: skip
    """The truth, off by constant factors, and the seconds of each setting by a `share`."""
    settings = [c.setting for c in replay.space.candidates]
    guesses = [
        Guess(seconds * share(s) * true_seconds(s), num_bytes * true_bytes(s)) for s in settings
    ]
    return Prior(tuple(guesses), ESTIMATED_SECONDS, ESTIMATED_BYTES, "the truth")
