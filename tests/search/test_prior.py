"""The prior from an estimate, the generic one, and what a probe says of what is like it."""

from __future__ import annotations

from math import log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.core.schema import DeviceInfo, TrainSetting
from planner.core.units import GIB
from planner.estimation.device_estimator import DeviceEstimator
from search.loop.space import make_space, space_of
from search.loop.surrogate.prior import (
    GUESSED_SECONDS,
    SPREAD_SECONDS,
    estimated_prior,
    generic_prior,
)
from search.loop.surrogate.process import GaussianProcess
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


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, len(SPACE) - 1), st.floats(-1, 1)), max_size=8))
def test_the_posterior_is_always_a_distribution(observed: list[tuple[int, float]]) -> None:
    process = GaussianProcess(SPACE, GUESSED_SECONDS, np.ones(len(SPACE)))
    for index, value in observed:
        process.observe(index, value, 0.01)
    mean, sd = process.predict()
    assert np.isfinite(mean).all()
    assert (sd > 0).all()


def test_an_arm_of_large_batches_is_on_the_line_of_two_estimates() -> None:
    """One alone would be taken as proportional, and twice the memory expected of batch 256."""
    axes = {"precision": ("bf16",), "compile": ("off",), "checkpointing": ("none",),
            "attention": ("sdpa",), "optimizer": ("adamw",)}  # fmt: skip
    space = make_space(MODEL, H100, restrict=axes, batch_sizes=(64, 128, 256))
    estimator = DeviceEstimator(H100)
    prior = estimated_prior(space, MODEL, H100, estimator, H100.total_bytes)
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
