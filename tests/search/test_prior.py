"""The prior of a search: from an estimate, a generic one, recorded in another process and kept;
and what a probe says of what is like it."""

from math import log
from pathlib import Path

import numpy as np
import pytest

from planner.core.schema import DeviceInfo, FactoryModel, TrainSetting
from planner.core.units import GIB
from planner.estimation.device_estimator import DeviceEstimator
from search.loop.space import make_space, space_of
from search.loop.surrogate.prior import (
    ESTIMATED_SECONDS,
    SPREAD_SECONDS,
    estimated_prior,
    generic_prior,
)
from search.loop.surrogate.process import GaussianProcess
from search.tuning.tune import device_prior, recording_seconds
from tests.search.tables import GPU, H100, MODEL, SMALL

SPACE = make_space(MODEL, GPU, restrict=SMALL)
CPU = DeviceInfo(kind="cpu", name="Test CPU", total_bytes=16 * GIB)


@pytest.mark.parametrize("device", [GPU, CPU])
def test_the_generic_prior_has_the_shape_of_the_trade_off(device: DeviceInfo) -> None:
    prior = generic_prior(SPACE, device)
    guess = {c.id: g for c, g in zip(SPACE.candidates, prior.guesses, strict=True)}
    for c in SPACE.candidates:
        blocks = c.setting.model_copy(update={"checkpointing": "blocks"})
        other = SPACE.find(blocks)
        if c.setting.checkpointing == "none":
            assert guess[other.id].num_bytes < guess[c.id].num_bytes
            assert guess[other.id].seconds > guess[c.id].seconds


def test_an_arm_of_large_batches_is_on_the_line_of_two_estimates() -> None:
    """One alone would be taken as proportional, and twice the memory expected of batch 256."""
    axes = {"precision": ("bf16",), "compile": ("off",), "checkpointing": ("none",),
            "attention": ("sdpa",), "optimizer": ("adamw",)}  # fmt: skip
    space = make_space(MODEL, H100, restrict=axes, batch_sizes=(64, 128, 256))
    estimator = DeviceEstimator(H100)
    prior = estimated_prior(space, MODEL, H100, estimator)
    for c, guess in zip(space.candidates, prior.guesses, strict=True):
        own = estimator(MODEL, c.setting)
        assert guess.num_bytes == pytest.approx(own.device_total_bytes, rel=0.03)
        assert guess.seconds == pytest.approx(own.throughput.step_seconds, rel=0.03)


PER_IMAGE = {"fp32": 0.004, "tf32": 0.002, "bf16": 0.001}


@pytest.mark.parametrize(
    ("parallelism", "sync", "waits"),
    [("ddp", "last", 1), ("zero1", "last", 1), ("ddp", "every", 4), ("zero2", "last", 4),
     ("fsdp", "last", 4)],
)  # fmt: skip
def test_the_wait_grows_with_the_exchanges_of_a_step(
    parallelism: str, sync: str, waits: int
) -> None:
    """As found at 32 micro-batches of 4 images and 16 of 8, it is predicted of 4 of 32."""
    fields = {"world_size": 4, "parallelism": parallelism, "gradient_sync": sync}
    assert TrainSetting(**fields, accumulate=4).num_exchanges == waits
    settings = [
        TrainSetting(**fields, batch_size=b, accumulate=128 // b, precision=p)
        for b in (4, 8, 32) for p in ("bf16", "tf32")
    ]  # fmt: skip
    space = space_of(settings)
    prior = np.array([128 * PER_IMAGE[c.setting.precision] for c in space.candidates])
    process = GaussianProcess(space, SPREAD_SECONDS, prior)
    true = [
        log(1.1 * seconds + 0.08 * c.setting.num_exchanges)
        for seconds, c in zip(prior, space.candidates, strict=True)
    ]
    for i, c in enumerate(space.candidates):
        if c.setting.batch_size < 32:
            process.observe(i, true[i], 0.01)
    found, _ = process.predict()
    for i, c in enumerate(space.candidates):
        assert found[i] == pytest.approx(true[i], abs=0.1), c.setting


def test_where_batches_ripple_more_is_expected_of_the_others() -> None:
    """Six that lie 10% beside the prior say that a seventh may."""
    space = space_of([TrainSetting(batch_size=b) for b in (8, 16, 24, 32, 48, 64, 96)])

    def deviation(ripple: float) -> float:
        process = GaussianProcess(space, ESTIMATED_SECONDS, [1.0] * len(space))
        for i in range(6):
            process.observe(i, ripple * (-1) ** i, 0.01)
        return float(process.predict()[1][6])

    assert deviation(0.1) > 1.5 * deviation(0.0)


def factory(name: str) -> FactoryModel:
    factory = f"tests.recording.models:{name}"  # not imported here: it imports torch
    return FactoryModel(factory=factory, image_size=(32, 32), num_classes=16)


@pytest.mark.parametrize(
    ("left", "recording"), [(8.0, 4.0), (20.0, 10.0), (60.0, 15.0), (600.0, 150.0)]
)
def test_a_short_budget_has_time_to_record_and_to_probe(left: float, recording: float) -> None:
    assert recording_seconds(left) == recording


def test_recording_ends_with_its_share_of_the_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANNER_CACHE_DIR", str(tmp_path))
    model = factory("convolutional")
    axes = {"precision": ("fp32",), "compile": ("off",), "checkpointing": ("none",)}
    space = make_space(model, CPU, restrict=axes, batch_sizes=(1, 4, 8, 16))
    prior, notes = device_prior(space, model, CPU, "auto", seconds_left=0.002)
    assert "in the time that was left" in notes[0]
    assert "a generic guess" in prior.basis


def test_a_whole_space_on_a_gpu_needs_few_recordings() -> None:
    """Eager fp32 and bf16 of each checkpointing stand for all; a fused optimizer is seen once."""
    model = factory("convolutional")
    space = make_space(model, H100)
    estimator = DeviceEstimator(H100)
    steps = estimator.steps_of(model, [c.setting for c in space.candidates])
    kinds = len(space.choices["checkpointing"])
    assert len(space) > 200 * kinds
    assert len(steps) <= 4 * (2 * kinds) + 4


def test_a_prior_is_kept_for_the_next_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANNER_CACHE_DIR", str(tmp_path))
    axes = {"precision": ("fp32",), "compile": ("off",), "attention": ("sdpa",)}
    space = make_space(MODEL, CPU, restrict=axes, batch_sizes=(1, 4))
    first, _ = device_prior(space, MODEL, CPU, "auto")

    monkeypatch.delattr("search.tuning.tune.estimated_prior")
    assert device_prior(space, MODEL, CPU, "auto")[0] == first
    with pytest.raises(NameError, match="estimated_prior"):
        device_prior(space, MODEL, H100, "auto")
