"""What a search expected of a probe is kept in its record."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.report.progress import progress_line
from planner.schema import MeasurementRecord, TrainSetting
from planner.schema.expected import Expected
from search.limits import Limits
from search.loader.strategy import LoaderStrategy
from search.progress import Progress
from search.replay import Replay, ReplayProber
from search.session import Session
from search.space import make_space
from search.strategies.named import make_strategy
from search.strategies.plain_default import PlainDefaultHunt, plain_arm
from search.strategies.strategy import TOLERANCE, Situation
from search.study.records import format_record, parse_record, read_records
from search.study.study import MemoryStudy
from search.surrogate.expectation import PriorExpectation
from search.surrogate.posterior import Posterior
from tests.search.loader.simulated import SimulatedProber, random_machine
from tests.search.loader.test_strategy import space_on
from tests.search.tables import BUDGET, GPU, MODEL, SMALL, invented_table, make_record, true_prior

STALE = Expected(phase="search", basis="probes", images_per_second=(1.0, 2.0, 3.0))
REPLAY = Replay([r.model_copy(update={"expected": STALE}) for r in invented_table()])
PRIOR = true_prior(REPLAY, seconds=1.3, num_bytes=1.05)


def searched(name: str, expects: bool = True, trials: int = 12) -> list[MeasurementRecord]:
    """The records of a search over a table whose own records hold another's expectation."""
    limits = Limits(trials)
    session = Session(
        REPLAY.space, MemoryStudy(), ReplayProber(REPLAY, limits), limits, lambda choice: 600.0,
        BUDGET,
    )  # fmt: skip
    if expects:
        session.expect = PriorExpectation(REPLAY.space, PRIOR, BUDGET)
    strategy = make_strategy(
        name, REPLAY.space, PRIOR, BUDGET, tolerance=TOLERANCE, images=None, seed=0
    )
    session.run(strategy)
    return session.records


def test_a_replay_stamps_what_this_search_expected_and_not_what_another_did() -> None:
    records = searched("planner")
    assert len(records) >= 3
    assert all(r.expected is not None and r.expected != STALE for r in records)
    first, *others = (r.expected for r in records if r.expected)
    assert (first.phase, first.basis) == ("calibrate", "prior")
    assert {e.basis for e in others} == {"probes"}
    assert {e.phase for e in others} <= {"search", "finalists"}


def test_intervals_hold_their_middle_and_narrow_as_probes_teach() -> None:
    records = [r for r in searched("planner") if r.status == "measured"]
    for record in records:
        assert record.expected is not None
        for figures in (record.expected.images_per_second, record.expected.used_bytes):
            assert figures is not None
            assert figures[0] < figures[1] < figures[2]
        assert record.expected.fits is not None
        assert 0 <= record.expected.fits <= 1
    widths = [e[2] / e[0] for r in records if r.expected and (e := r.expected.images_per_second)]
    assert widths[-1] < widths[0]
    # The prior is 30% too slow: after one probe the search knows.
    rates = [(r.expected.images_per_second or STALE.images_per_second or (1, 1, 1))[1]
             / (r.images_per_second or 1) for r in records if r.expected]  # fmt: skip
    assert rates[0] == pytest.approx(1 / 1.3, rel=0.05)
    assert rates[-1] == pytest.approx(1, rel=0.05)


def test_a_repeat_is_expected_with_the_noise_of_a_probe() -> None:
    posterior = Posterior(REPLAY.space, PRIOR, BUDGET)
    candidate = REPLAY.space.candidates[0]
    for _ in range(40):
        posterior.observe(0, make_record(candidate.setting))
    expect = PriorExpectation(REPLAY.space, PRIOR, BUDGET)
    expect.__dict__["_posterior"] = posterior
    found = expect(candidate, "finalists")
    assert found is not None
    assert found.images_per_second is not None
    assert found.images_per_second[2] / found.images_per_second[0] > 1.03


@pytest.mark.parametrize("name", ["tpe", "random", "bounded-grid"])
def test_for_a_strategy_without_a_belief_the_prior_stands_in(name: str) -> None:
    records = searched(name, trials=4)
    expected = [r.expected for r in records]
    assert all(e is not None and e.basis == "prior" and e.fits is not None for e in expected)


def test_where_nothing_is_expected_nothing_is_kept() -> None:
    assert [r.expected for r in searched("random", expects=False, trials=3)] == [None] * 3


def test_the_largest_numbers_are_still_numbers() -> None:
    prior = true_prior(REPLAY, seconds=1e-300, num_bytes=1e290)
    expect = PriorExpectation(REPLAY.space, prior, BUDGET)
    record = make_record(REPLAY.space.candidates[0].setting)
    found = expect(REPLAY.space.candidates[0], "search")
    stamped = record.model_copy(update={"expected": found})
    assert parse_record(format_record(stamped)) == stamped


def test_a_setting_outside_the_space_is_not_expected() -> None:
    expect = PriorExpectation(REPLAY.space, PRIOR, BUDGET)
    other = make_space(MODEL, GPU, restrict=SMALL, batch_sizes=(7,)).candidates[0]
    assert expect(other, "search") is None


def test_without_a_limit_no_probability_to_fit_is_said() -> None:
    found = PriorExpectation(REPLAY.space, PRIOR, None)(REPLAY.space.candidates[0], "search")
    assert found is not None
    assert found.fits is None


def test_the_plain_default_is_expected_too() -> None:
    arm = plain_arm(REPLAY.space)
    assert arm is not None
    choice = PlainDefaultHunt(REPLAY.space, PRIOR, BUDGET, arm).ask(Situation())
    assert choice is not None
    assert choice.expected is not None
    assert choice.expected.phase == "baseline"


def test_records_of_before_read_and_are_written_as_they_were(tmp_path: Path) -> None:
    old = format_record(make_record(TrainSetting()))
    assert b"expected" not in old
    assert parse_record(old).expected is None
    table = read_records("tests/truth/cpu_grid_2026-11-20.jsonl")
    assert not table.fault
    assert all(r.expected is None for r in table.records)
    new = make_record(TrainSetting()).model_copy(update={"expected": STALE})
    assert parse_record(format_record(new)) == new


def test_a_strategy_for_loaders_says_what_it_expects_after_the_first_probe() -> None:
    _, machine = random_machine(3)
    space, prober = space_on(machine), SimulatedProber(machine, 3)
    strategy = LoaderStrategy(space, machine.cpus, TOLERANCE)
    session = Session(space, MemoryStudy(), prober, Limits(12), lambda choice: 60.0, None)
    session.run(strategy)
    expected = [(r.expected, r.images_per_second) for r in session.records]
    assert expected[0][0] is None
    known = [(e.images_per_second, found) for e, found in expected if e is not None]
    assert len(known) >= 2
    for figures, found in known:
        assert figures is not None
        assert found
        assert 0 < figures[0] < figures[1] < figures[2]


def test_a_line_of_progress_says_what_probes_made_the_search_expect() -> None:
    def line(basis: str) -> str:
        candidate = REPLAY.space.candidates[0]
        expected = Expected.model_validate({**STALE.model_dump(), "basis": basis})
        record = make_record(candidate.setting).model_copy(update={"expected": expected})
        return progress_line(Progress("end", phase="search", candidate=candidate, record=record))

    assert " images/s (expected 2), " in line("probes")
    assert "expected" not in line("prior")
