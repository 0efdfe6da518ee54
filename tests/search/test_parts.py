"""What failures close: what they share, a precision or an attention last."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from planner.core.schema import TrainSetting
from planner.core.units import GIB
from search.loop.recommend import find_excluded
from search.loop.space import candidate, make_space
from search.loop.surrogate.parts import BrokenParts
from search.loop.surrogate.posterior import BROKEN, Posterior
from search.loop.surrogate.prior import generic_prior
from tests.search.tables import GPU, MODEL, make_record

SPACE = make_space(MODEL, GPU, batch_sizes=(8, 16))
SETTINGS = [c.setting for c in SPACE.candidates]
PLAIN = {"precision": "bf16", "checkpointing": "none", "compile": "off", "attention": "sdpa",
         "optimizer": "adamw", "batch_size": 8}  # fmt: skip


def at(**changes: object) -> int:
    """The position of a plain setting with some changes."""
    setting = TrainSetting.model_validate({**PLAIN, **changes})
    return SPACE.index(setting.with_recipe(of_swin=True))


def closed_after(*failures: int) -> BrokenParts:
    """Where the plain setting ran, so that neither bf16 nor sdpa is the cause."""
    broken = BrokenParts(SPACE)
    broken.ran(at())
    for index in failures:
        broken.broke(index)
    return broken


def closes(broken: BrokenParts) -> np.ndarray:
    return broken.probabilities() < BROKEN


def share(wanted: Callable[[TrainSetting], bool], found: np.ndarray) -> float:
    return float(np.mean([f for f, s in zip(found, SETTINGS, strict=True) if wanted(s)]))


def test_two_failures_of_a_compile_mode_close_it_and_no_other() -> None:
    one = closed_after(at(compile="default"))
    assert share(lambda s: s.compile == "default", closes(one)) < 0.1, "one could be its arm's"
    two = closed_after(at(compile="default"), at(compile="default", precision="fp32"))
    found = closes(two)
    assert share(lambda s: s.compile == "default", found) == 1
    assert share(lambda s: s.compile != "default", found) == 0


def test_two_modes_that_fail_close_the_compiler() -> None:
    found = closed_after(
        at(compile="default"), at(compile="default", precision="fp32"),
        at(compile="reduce-overhead"), at(compile="reduce-overhead", precision="fp32"),
    ).probabilities()  # fmt: skip
    assert share(lambda s: s.compile == "max-autotune", found) < 0.3
    assert share(lambda s: s.compile == "off", found) > 0.98


def test_a_broken_optimizer_is_found_whatever_else_the_failures_share() -> None:
    """Both compiled in one mode and fused: either may be it, until one of them ran."""
    fused = {"compile": "default", "optimizer": "adamw-fused"}
    broken = closed_after(at(**fused), at(**fused, precision="fp32"))
    assert share(lambda s: s.optimizer == "adamw", closes(broken)) == 0
    broken.ran(at(compile="default"))
    found = closes(broken)
    assert share(lambda s: s.optimizer == "adamw-fused", found) == 1
    assert share(lambda s: s.optimizer == "adamw", found) == 0


@pytest.mark.parametrize(("axis", "value"), [("precision", "bf16"), ("attention", "sdpa")])
def test_a_precision_or_an_attention_is_closed_last(axis: str, value: str) -> None:
    """Where all else runs: two failures may be their arms', four are not."""
    arms = [at(**{axis: value, "checkpointing": c}) for c in SPACE.choices["checkpointing"]]
    broken = BrokenParts(SPACE)
    for c in SPACE.candidates:
        if getattr(c.setting, axis) != value:
            broken.ran(SPACE.index(c.setting))
    with_it = [getattr(s, axis) == value for s in SETTINGS]
    for index in arms[:2]:
        broken.broke(index)
    assert not closes(broken)[with_it].all()
    for index in arms[2:4]:
        broken.broke(index)
    assert closes(broken)[with_it].all()
    assert not closes(broken)[np.invert(with_it)].any()


def test_what_a_failure_is_said_to_share_is_what_most_failures_had() -> None:
    """One of four was compiled: the compiler was blamed for all of them."""
    failed = [
        make_record(SETTINGS[at(**changes)]).model_copy(
            update={"status": "crashed", "step_seconds": (), "device_bytes": None}
        )
        for changes in (
            {}, {"checkpointing": "blocks"}, {"attention": "eager"}, {"compile": "default"},
        )
    ]  # fmt: skip
    records = [*failed, make_record(SETTINGS[at(precision="fp32")])]
    posterior = Posterior(SPACE, generic_prior(SPACE, GPU), 80 * GIB)
    for record in records:
        posterior.tell(candidate(record.setting), record)
    said = {r.reason for r in find_excluded(posterior, records) if r.setting.precision == "bf16"}
    said = {reason for reason in said if "was probed" not in reason}
    assert said == {"unlikely to run, as 4 probes with bf16 failed"}
