"""The first minutes on a device: what is looked at, and when it is settled. The sights themselves
run on an emulated GPU (tests/emulated/test_commands.py)."""

from __future__ import annotations

import pytest

from planner.core.errors import UnsupportedError
from planner.libraries.registry import find_library
from planner.step.attention import backward_scratch
from tests.truth.first import Subject, is_seen


@pytest.mark.parametrize(
    ("statuses", "is_done"),
    [(["seen"], True), (["failed"], False), (["failed", "timed_out"], True), ([], False)],
)
def test_a_run_goes_on_with_what_was_not_seen(statuses: list[str], is_done: bool) -> None:
    records = [{"observation": "context", "status": status} for status in statuses]
    assert is_seen("context", records) is is_done
    assert not is_seen("driver", records)


@pytest.mark.parametrize(
    "setting",
    [{"batch_size": 1024}, {"batch_size": 64, "accumulate": 2, "compile": "reduce-overhead"}],
)
def test_what_the_planner_refuses_can_be_seen(setting: dict[str, object]) -> None:
    """Fields go in unchecked and unresolved, but for the attention that the library would run."""
    subject = Subject(**setting)
    assert subject.setting.attention == "sdpa"
    with pytest.raises(UnsupportedError):
        find_library("native").resolve(subject.model, subject.setting)


def test_expected_workspace_is_that_of_the_first_stage() -> None:
    """64 images of 64 windows, 3 heads, 49 tokens of 32: what docs/how-it-works.md says."""
    assert backward_scratch((64 * 64, 3, 49, 32), is_half=True).workspace == 201_523_200
