"""What a search expected of a probe is kept in its record."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.core.schema import MeasurementRecord, TrainSetting
from planner.core.schema.record import Expected
from search.loop.records import format_record, parse_record, read_records
from tests.search.replays import Replay, search_table
from tests.search.tables import BUDGET, invented_table, make_record, true_prior

STALE = Expected(phase="search", basis="probes", images_per_second=(1.0, 2.0, 3.0))
REPLAY = Replay([r.model_copy(update={"expected": STALE}) for r in invented_table()])


def searched() -> list[MeasurementRecord]:
    """The records of a search over a table whose own records hold another's expectation."""
    prior = true_prior(REPLAY, seconds=1.3, num_bytes=1.05)
    return search_table(REPLAY, prior, BUDGET, trials=12)[0].records


def test_it_stamps_what_this_search_expected_and_not_what_another_did() -> None:
    records = searched()
    assert len(records) >= 3
    assert all(r.expected is not None and r.expected != STALE for r in records)
    first, *others = (r.expected for r in records if r.expected)
    assert (first.phase, first.basis) == ("calibrate", "prior")
    assert {e.basis for e in others} == {"probes"}
    assert {e.phase for e in others} <= {"search", "finalists", "baseline"}


def test_intervals_hold_their_middle_and_narrow_as_probes_teach() -> None:
    records = [r for r in searched() if r.status == "measured"]
    for record in records:
        for figures in (record.expected.images_per_second, record.expected.used_bytes):
            assert figures[0] < figures[1] < figures[2]
        assert 0 <= record.expected.fits <= 1
    widths = [e[2] / e[0] for r in records if r.expected and (e := r.expected.images_per_second)]
    assert widths[-1] < widths[0]
    # The prior is 30% too slow: after one probe the search knows.
    rates = [(r.expected.images_per_second or STALE.images_per_second or (1, 1, 1))[1]
             / (r.images_per_second or 1) for r in records if r.expected]  # fmt: skip
    assert rates[0] == pytest.approx(1 / 1.3, rel=0.05)
    assert rates[-1] == pytest.approx(1, rel=0.05)


def test_records_of_before_read_and_are_written_as_they_were(tmp_path: Path) -> None:
    old = format_record(make_record(TrainSetting()))
    assert b"expected" not in old
    assert parse_record(old).expected is None
    table = read_records("tests/truth/cpu_grid_2026-11-20.jsonl")
    assert not table.fault
    assert all(r.expected is None for r in table.records)
    new = make_record(TrainSetting()).model_copy(update={"expected": STALE})
    assert parse_record(format_record(new)) == new
