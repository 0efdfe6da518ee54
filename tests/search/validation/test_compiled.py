"""Compiled steps that were measured, beside what is estimated of them once they are traced."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.core.schema import MeasurementRecord
from search.loop.study.records import read_records
from search.tuning.validation.compare import compare, trace_compiled

TRUTH = Path(__file__).parents[2] / "truth"
H200 = ("h200/tuned.jsonl", "h200/crowded.jsonl")
EMULATED = ("emulated/a100-sxm-80gb-compiled-torch-2.15.jsonl",)


@pytest.fixture(autouse=True)
def _no_trace_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANNER_CACHE_DIR", str(tmp_path / "cache"))


def compiled_in(names: tuple[str, ...]) -> list[MeasurementRecord]:
    records = [record for name in names for record in read_records(TRUTH / name).records]
    return [r for r in records if r.setting.compile != "off" and r.status == "measured"]


@pytest.mark.release
@pytest.mark.parametrize(("names", "count"), [(H200, 11), (EMULATED, 2)], ids=["h200", "emulated"])
def test_what_compiled_steps_took_is_what_their_trace_says(
    names: tuple[str, ...], count: int
) -> None:
    """Allocated within 1%: what Inductor orders otherwise hardly moves the peak. Reserved within
    8%: it moves the holes. Without a trace, the eager step was 10% to 11% over."""
    records = compiled_in(names)
    assert len(records) == count
    trace_compiled(records)
    for found in compare(records):
        assert found.estimate.low_bytes < found.figures["reserved"][1] < found.estimate.high_bytes
        assert abs(found.error("reserved") or 0) < 0.08
        if "allocated" in found.figures:
            assert abs(found.error("allocated") or 0) < 0.01
