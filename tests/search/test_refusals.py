"""Whole searches on machines that refuse what is fastest: they end with the best of the rest."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from planner.core.schema import MeasurementRecord, TrainSetting
from planner.core.units import GIB
from search.loop.search import SAME_FAILURES, Search
from search.loop.space import Candidate, space_of
from tests.search.replays import Replay, search_table
from tests.search.tables import (
    failed,
    invented_table,
    make_record,
    true_bytes,
    true_prior,
    true_seconds,
)

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
Refuses = Callable[[TrainSetting, TrainSetting], bool]


class Refusing:
    """A machine on which some settings fail, with one message for all. `refuses` is asked of a
    setting and of the first that was probed."""

    def __init__(self, refuses: Refuses, status: str = "unsupported") -> None:
        self.refuses, self.status = refuses, status
        self.asked: list[TrainSetting] = []

    def probe(self, candidate: Candidate) -> MeasurementRecord:
        self.asked.append(candidate.setting)
        record = make_record(candidate.setting)
        if not self.refuses(candidate.setting, self.asked[0]):
            return record
        said = "Cannot find a working triton installation."
        return failed(record, self.status, message=said, probe_seconds=6.0)


def search(machine: Refusing, trials: int | None = 40) -> tuple[Search, str]:
    replay = Replay(TABLE)
    return search_table(replay, true_prior(replay), BUDGET, machine, trials=trials)


def is_compiled(setting: TrainSetting, _: TrainSetting | None = None) -> bool:
    return setting.compile != "off"


@pytest.mark.parametrize(
    ("refuses", "status"),
    [
        (is_compiled, "unsupported"),
        (lambda s, first: s.differences(first).keys() <= {"batch_size"}, "crashed"),
        (lambda s, _: s.precision == "bf16", "non_finite"),
        (lambda s, _: s.optimizer == "adamw-fused", "unsupported"),
        (lambda s, _: s.attention == "sdpa", "crashed"),
    ],
)
def test_a_search_survives_what_its_machine_lacks(refuses: Refuses, status: str) -> None:
    prober = Refusing(refuses, status)
    session, stopped = search(prober)
    assert "another probe would gain" in stopped
    best = session.best
    assert best is not None
    first = prober.asked[0]
    rest = [c.setting for c in SPACE.candidates if not refuses(c.setting, first)]
    fits = [s for s in rest if true_bytes(s) <= BUDGET]
    fastest = max(s.batch_size * s.accumulate / true_seconds(s) for s in fits)
    assert best.images_per_second >= 0.98 * fastest
    refused = [s for s in prober.asked if refuses(s, first)]
    assert len(refused) <= 6, refused


def test_without_a_compiler_one_of_the_first_three_probes_needs_none() -> None:
    prober = Refusing(is_compiled)
    search(prober, trials=3)
    assert not all(map(is_compiled, prober.asked))


def test_where_everything_is_refused_alike_it_ends_after_a_plain_setting() -> None:
    prober = Refusing(lambda *_: True)
    session, stopped = search(prober)
    assert stopped == f"the first {len(prober.asked)} probes failed alike"
    assert len(prober.asked) <= SAME_FAILURES + 3, "one in each precision and attention left"
    assert any((s.compile, s.optimizer) == ("off", "adamw") for s in prober.asked)
    assert session.best is None
