"""The prior from an estimate, the generic one, and what probes do to them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.core.schema import DeviceInfo
from planner.core.units import GIB
from planner.estimation.device_estimator import DeviceEstimator
from search.loop.space import make_space
from search.loop.surrogate.posterior import Posterior
from search.loop.surrogate.prior import GUESSED_SECONDS, estimated_prior, generic_prior
from search.loop.surrogate.process import GaussianProcess
from tests.search.tables import GPU, H100, MODEL, SMALL, make_record

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


def test_an_out_of_memory_closes_what_is_as_large_and_raises_the_rest() -> None:
    posterior = Posterior(SPACE, generic_prior(SPACE, GPU), 16 * GIB)
    index = next(i for i, c in enumerate(SPACE.candidates) if c.setting.batch_size == 512)
    arm = SPACE.candidates[index].arm
    before = posterior.predict()
    posterior.tell(posterior.space.candidates[index], make_record(SPACE.candidates[index].setting))
    after = posterior.predict()
    for i, c in enumerate(SPACE.candidates):
        if c.arm == arm:
            assert posterior.excluded[i] == (c.setting.batch_size >= 512)
    assert after.log_bytes[index] > np.log(16 * GIB)
    assert after.log_bytes[index] >= before.log_bytes[index]


def test_what_fits_says_that_smaller_batches_do() -> None:
    posterior = Posterior(SPACE, generic_prior(SPACE, GPU), 16 * GIB)
    index = next(i for i, c in enumerate(SPACE.candidates) if c.setting.batch_size == 64)
    posterior.tell(posterior.space.candidates[index], make_record(SPACE.candidates[index].setting))
    fits = posterior.predict().fits
    for i, c in enumerate(SPACE.candidates):
        if c.arm == SPACE.candidates[index].arm and c.setting.batch_size <= 64:
            assert fits[i] == 1.0


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
