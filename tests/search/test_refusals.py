"""Whole searches on machines that refuse what is fastest: they end with the best of the rest."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from planner.core.schema import MeasurementRecord, TrainSetting
from planner.core.units import GIB
from search.loop.options import SearchOptions
from search.loop.search import SAME_FAILURES, Limits, Search
from search.loop.space import Choice, space_of
from search.loop.study import ProbeStudy
from search.loop.surrogate.prior import ESTIMATED_BYTES, ESTIMATED_SECONDS, Guess, Prior
from tests.search.tables import invented_table, make_record, true_bytes, true_seconds

BUDGET = 15 * GIB
TABLE = invented_table(
    restrict={
        "precision": ("fp32", "bf16"),
        "checkpointing": ("none", "blocks"),
        "compile": ("off", "default", "reduce-overhead", "max-autotune"),
        "attention": ("eager", "sdpa"),
        "optimizer": ("adamw", "adamw-fused"),
    }
)
SPACE = space_of(r.setting for r in TABLE)
PRIOR = Prior(
    tuple(Guess(true_seconds(c.setting), true_bytes(c.setting)) for c in SPACE.candidates),
    ESTIMATED_SECONDS, ESTIMATED_BYTES, "the truth",
)  # fmt: skip
Refuses = Callable[[TrainSetting], bool]


class Refusing:
    """A prober for a machine on which some settings fail, with one message for all."""

    def __init__(self, refuses: Refuses, status: str = "unsupported") -> None:
        self.refuses, self.status = refuses, status
        self.asked: list[TrainSetting] = []

    def __call__(self, choice: Choice, probe_id: str, deadline_seconds: float) -> MeasurementRecord:
        setting = choice.candidate.setting
        self.asked.append(setting)
        record = make_record(setting)
        if not self.refuses(setting):
            return record
        failed = {"status": self.status, "message": "Cannot find a working triton installation.",
                  "step_seconds": (), "images_per_second": None, "device_bytes": None,
                  "peak_allocated_bytes": None, "probe_seconds": 6.0}  # fmt: skip
        return record.model_copy(update=failed)


def search(prober: Refusing, trials: int | None = 40) -> tuple[Search, str]:
    study = ProbeStudy(SPACE, budget_bytes=BUDGET)
    found = Search(study, PRIOR, prober, Limits(trials), SearchOptions(trials=trials))
    return found, found.run()[0]


def best_of_the_rest(refuses: Refuses) -> float:
    return max(
        c.images / true_seconds(c.setting)
        for c in SPACE.candidates
        if not refuses(c.setting) and true_bytes(c.setting) <= BUDGET
    )


def is_compiled(setting: TrainSetting) -> bool:
    return setting.compile != "off"


def is_fused(setting: TrainSetting) -> bool:
    return setting.optimizer == "adamw-fused"


def is_bf16(setting: TrainSetting) -> bool:
    return setting.precision == "bf16"


def is_sdpa(setting: TrainSetting) -> bool:
    return setting.attention == "sdpa"


@cache
def first_asked() -> TrainSetting:
    first = Refusing(lambda s: False)
    search(first, trials=1)
    return first.asked[0]


def is_one_arm(setting: TrainSetting) -> bool:
    """That of the setting that is probed first."""
    return setting.differences(first_asked()).keys() <= {"batch_size"}


@pytest.mark.parametrize(
    ("refuses", "status"),
    [
        (is_compiled, "unsupported"),
        (is_one_arm, "crashed"),
        (is_bf16, "non_finite"),
        (is_fused, "unsupported"),
        (is_sdpa, "crashed"),
    ],
)
def test_a_search_survives_what_its_machine_lacks(refuses: Refuses, status: str) -> None:
    prober = Refusing(refuses, status)
    session, stopped = search(prober)
    assert "another probe would gain" in stopped
    best = session.best
    assert best is not None
    assert best.images_per_second >= 0.98 * best_of_the_rest(refuses)
    refused = [s for s in prober.asked if refuses(s)]
    assert len(refused) <= 6, refused


def test_without_a_compiler_one_of_the_first_three_probes_needs_none() -> None:
    prober = Refusing(is_compiled)
    search(prober, trials=3)
    assert not all(map(is_compiled, prober.asked))


def test_where_everything_is_refused_alike_it_ends_after_a_plain_setting() -> None:
    prober = Refusing(lambda setting: True)
    session, stopped = search(prober)
    assert stopped == f"the first {len(prober.asked)} probes failed alike"
    assert len(prober.asked) <= SAME_FAILURES + 3, "one in each precision and attention left"
    assert any(not is_compiled(s) and not is_fused(s) for s in prober.asked)
    assert session.best is None
