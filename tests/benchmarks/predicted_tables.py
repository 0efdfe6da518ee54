"""Tables of what the estimate predicts for GPUs, with a wobble: to choose constants by.

    python -m tests.benchmarks.predicted_tables DIRECTORY

They are no measurements, say so in every record's versions, and prove nothing about a device. What
they have is the shape of a GPU's trade-off, with a boundary of memory and near ties by the dozen.
"""

from __future__ import annotations

import argparse
from math import exp
from pathlib import Path
from random import Random

from planner.libraries.resolve import resolve_model
from planner.schema import DeviceInfo, MeasurementRecord, SwinConfig
from planner.units import GIB
from search.space import Candidate, make_space
from search.study.records import append_records
from search.surrogate.estimator import DeviceEstimator
from search.surrogate.prior import Guess, estimated_prior
from search.surrogate.probe_cost import guess_compile_seconds

H100 = DeviceInfo(
    kind="cuda", name="NVIDIA H100 80GB HBM3", total_bytes=80 * GIB, capability=(9, 0)
)
RTX_3090 = DeviceInfo(
    kind="cuda", name="NVIDIA GeForce RTX 3090", total_bytes=24 * GIB, capability=(8, 6)
)
AXES = {
    "precision": ("fp32", "tf32", "bf16"),
    "checkpointing": ("none", "blocks", "stages"),
    "attention": ("eager", "sdpa"),
    "optimizer": ("adamw",),
}
TABLES = {
    "predicted-h100-eager": (
        "native:swin_tiny", H100, ("off",),
        (4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768),
    ),
    "predicted-h100-compiled": (
        "native:swin_tiny", H100, ("off", "default", "reduce-overhead"),
        (4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768),
    ),
    "predicted-rtx-3090": (
        "timm:swin_base_patch4_window7_224", RTX_3090, ("off", "default"),
        (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256),
    ),
}  # fmt: skip
WOBBLE = 0.02  # standard deviation of the log of a setting's step time
START_SECONDS = 3.0
TIMED_SECONDS = 2.0


def predict_table(name: str) -> list[MeasurementRecord]:
    """The records of one of `TABLES`: measured where the prediction fits, else out of memory."""
    model_name, device, modes, batches = TABLES[name]
    model = resolve_model(model_name)
    assert isinstance(model, SwinConfig)
    space = make_space(model, device, restrict={**AXES, "compile": modes}, batch_sizes=batches)
    prior = estimated_prior(space, model, device, DeviceEstimator(device), device.total_bytes)
    random = Random(name)
    return [
        _record(model, device, c, guess, random)
        for c, guess in zip(space.candidates, prior.guesses, strict=True)
    ]


def _record(
    model: SwinConfig, device: DeviceInfo, c: Candidate, guess: Guess, random: Random
) -> MeasurementRecord:
    compiling = guess_compile_seconds("cuda", sum(model.depths))[c.setting.compile]
    common = {
        "model": model, "setting": c.setting, "device": device, "probe_id": c.id,
        "versions": {"predicted": "not measured"}, "date": "2026-11-20T00:00:00+00:00",
    }  # fmt: skip
    if guess.num_bytes > device.total_bytes:
        return MeasurementRecord(
            status="out_of_memory", message="predicted", probe_seconds=START_SECONDS, **common
        )
    seconds = guess.seconds * exp(random.gauss(0, WOBBLE))
    samples = (seconds,) * max(5, min(50, int(TIMED_SECONDS / seconds)))
    return MeasurementRecord(
        status="measured",
        step_seconds=samples,
        images_per_second=c.images / seconds,
        peak_allocated_bytes=int(guess.num_bytes),
        device_bytes=int(guess.num_bytes),
        compile_seconds=compiling or None,
        probe_seconds=START_SECONDS + compiling + 5 * seconds + sum(samples),
        **common,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes tables of predictions.")
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    for name in TABLES:
        append_records(directory / f"{name}.jsonl", predict_table(name))


if __name__ == "__main__":
    main()
