"""What a search expected of a probe is kept in its record."""

from __future__ import annotations

import pytest

from planner.core.schema.record import Expected
from tests.search.replays import Replay, search_table
from tests.search.tables import BUDGET, invented_table, true_prior

STALE = Expected(phase="search", basis="probes", images_per_second=(1.0, 2.0, 3.0))
REPLAY = Replay([r.model_copy(update={"expected": STALE}) for r in invented_table()])


def test_it_stamps_what_this_search_expected_and_not_what_another_did() -> None:
    """Over a table whose own records hold another's expectation."""
    prior = true_prior(REPLAY, seconds=1.3, num_bytes=1.05)
    records = search_table(REPLAY, prior, BUDGET, trials=12)[0].records
    assert len(records) >= 3
    assert all(r.expected is not None and r.expected != STALE for r in records)
    first, *others = (r.expected for r in records if r.expected)
    assert (first.phase, first.basis) == ("calibrate", "prior")
    assert {e.basis for e in others} == {"probes"}
    assert {e.phase for e in others} <= {"search", "finalists", "baseline"}
    for expected in (first, *others):
        for low, middle, high in (expected.images_per_second, expected.used_bytes):
            assert low < middle < high
        assert 0 <= expected.fits <= 1
    # The prior is 30% too slow: after one probe the search knows.
    ran = [r for r in records if r.status == "measured"]
    shares = [r.expected.images_per_second[1] / r.images_per_second for r in (ran[0], ran[-1])]
    assert shares == [pytest.approx(1 / 1.3, rel=0.05), pytest.approx(1, rel=0.05)]
