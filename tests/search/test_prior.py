"""The prior from an estimate, the generic one, and what probes do to them."""

from __future__ import annotations

from math import log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.core.schema import DeviceInfo, TrainSetting
from planner.core.units import GIB
from planner.estimation.device_estimator import DeviceEstimator
from search.loop.space import Space, make_space, space_of
from search.loop.surrogate.posterior import Posterior
from search.loop.surrogate.prior import (
    ESTIMATED_SECONDS,
    GUESSED_SECONDS,
    SPREAD_SECONDS,
    estimated_prior,
    generic_prior,
)
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


AXES = {
    "precision": ("fp32", "tf32", "bf16"), "checkpointing": ("none",), "optimizer": ("adamw",),
    "compile": ("off", "default"), "attention": ("eager", "sdpa"),
}  # fmt: skip


@pytest.fixture
def space() -> Space:
    return make_space(MODEL, GPU, restrict=AXES, batch_sizes=(8, 16, 32, 64, 128))


def at(space: Space, **fields: object) -> int:
    plain = {"compile": "off", "attention": "sdpa", "precision": "bf16", "batch_size": 32}
    wanted = (plain | fields).items()
    return next(
        i for i, c in enumerate(space.candidates)
        if all(getattr(c.setting, name) == value for name, value in wanted)
    )  # fmt: skip


def test_what_a_compiler_gains_is_mostly_common_to_attentions(space: Space) -> None:
    """A compiled step with one attention is slower than expected: so will that with another be,
    rather than that its attention alone was the cause."""
    process = GaussianProcess(space, ESTIMATED_SECONDS, np.ones(len(space)))
    for attention in ("eager", "sdpa"):
        process.observe(at(space, attention=attention), 0.0, 0.01)
    process.observe(at(space, attention="sdpa", compile="default"), 0.3, 0.01)
    mean, _ = process.predict(np.array([at(space, attention="eager", compile="default")]))
    assert 0.15 < mean[0] < 0.3


PER_IMAGE = {"fp32": 0.004, "tf32": 0.002, "bf16": 0.001}


def spread(space: Space) -> GaussianProcess:
    prior = (c.setting.batch_size * PER_IMAGE[c.setting.precision] for c in space.candidates)
    return GaussianProcess(space, SPREAD_SECONDS, prior)


# A wait that is a small part of a step is found less exactly.
@pytest.mark.parametrize(("waits", "within"), [(0.07, 0.1), (0.226, 0.06), (0.3, 0.06)])
def test_what_each_step_waits_for_a_link_is_found_from_steps_of_different_lengths(
    space: Space, waits: float, within: float
) -> None:
    """Though the device is slower than expected too: a larger batch then gains what is shared."""
    process = spread(space)
    for fields in ({}, {"precision": "tf32"}, {"attention": "eager", "batch_size": 16}):
        index = at(space, **fields)
        process.observe(index, log(1.2 * process.prior[index] + waits), 0.01)
    unseen = at(space, batch_size=128)
    found, _ = process.predict(np.array([unseen]))
    assert found[0] == pytest.approx(log(1.2 * process.prior[unseen] + waits), abs=within)


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
