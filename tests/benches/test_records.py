"""Records of benchmarks: kept, read and compared without a difference that is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.benches.records import append_record, compare, read_records
from planner.errors import PlannerError
from planner.report.bench import comparison_text
from tests.benches.cases import record, small_case


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    """And a line that was torn is cut off before the next."""
    file = tmp_path / "bench.jsonl"
    first, second = record(1e-3, 9e-4, 2e-3), record(2e-3, 1e-3, 3e-3)
    append_record(file, first)
    with file.open("a") as stream:
        stream.write('{"bench":"atten')
    append_record(file, second)
    assert read_records(file) == (first, second)


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    file = tmp_path / "bench.jsonl"
    append_record(file, record(1e-3, 9e-4, 2e-3))
    with file.open("a") as stream:
        stream.write('{"a": 1}\n')
    with pytest.raises(PlannerError, match="line 2 is not a record"):
        read_records(file)


def test_intervals_that_overlap_show_no_difference() -> None:
    one, other = record(1.00, 0.90, 1.12), record(1.20, 1.10, 1.30)
    (found,) = compare([one], [other]).differences
    assert not found.is_real
    assert found.verdict == "no difference shown"


def test_intervals_apart_show_how_much_at_least() -> None:
    """From 1.0 to 2.0 seconds is half the speed; at least, from 1.1 to 1.8."""
    slow = compare([record(1.0, 0.9, 1.1)], [record(2.0, 1.8, 2.2)]).differences[0]
    assert slow.verdict == "slower by 50.0% (at least 38.9%)"
    fast = compare([record(2.0, 1.8, 2.2)], [record(1.0, 0.9, 1.1)]).differences[0]
    assert fast.verdict == "faster by 100.0% (at least 63.6%)"


def test_too_few_samples_show_nothing() -> None:
    sure = record(1.0, 0.9, 1.1)
    assert sure.both is not None
    unsure = sure.both.model_copy(update={"certain": False})
    (found,) = compare(
        [sure.model_copy(update={"both": unsure})], [record(3.0, 2.9, 3.1)]
    ).differences
    assert not found.is_real


def test_a_wrong_result_is_not_compared() -> None:
    wrong = record(0.5, 0.4, 0.6, status="disagrees")
    found = compare([record(1.0, 0.9, 1.1)], [wrong])
    assert found.differences == ()
    assert found.not_compared == (small_case(),)


def test_the_versions_that_differ_are_said() -> None:
    newer = record(1.0, 0.9, 1.1, versions={"torch": "2.13.0", "timm": "1.0.31"})
    found = compare([record(1.0, 0.9, 1.1)], [newer])
    assert found.changed == {"torch": ("2.12.0", "2.13.0"), "timm": ("none", "1.0.31")}
    text = comparison_text(found)
    assert "torch: 2.12.0 -> 2.13.0" in text
    assert "no difference shown" in text


def test_only_the_newest_environment_of_a_file_counts() -> None:
    """Records of two environments in one file are never one side of a comparison."""
    old, new = record(9.0, 8.0, 10.0, versions={"torch": "2.9.0"}), record(1.0, 0.9, 1.1)
    found = compare([old, new], [new])
    assert found.first.others == 1
    assert found.differences[0].ratio == 1
    assert "1 records of other environments" in comparison_text(found)
