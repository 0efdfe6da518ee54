"""What a probe says of the settings that it shares something with."""

from __future__ import annotations

from math import log

import numpy as np
import pytest

from planner.core.schema import TrainSetting
from search.loop.space import Space, make_space, space_of
from search.loop.surrogate.prior import ESTIMATED_SECONDS, SPREAD_SECONDS
from search.loop.surrogate.process import GaussianProcess
from tests.search.tables import GPU, MODEL

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
