"""Every library's real attention, by itself: right before it is timed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from planner.core.errors import PlannerError
from search.tuning.benches import attention as benched
from search.tuning.benches.attention import TOLERANCES, Subject, time_case
from search.tuning.benches.cases import PATHS, Case, cases_of, one_stage
from tests.covering import covering

LIBRARIES = ("native", "timm", "torchvision", "transformers")


def small_cases(
    library: Any, feature_map: tuple[int, int], paths: Sequence[str] = PATHS[:2],
    precision: str = "fp32",
) -> Iterator[Case]:  # fmt: skip
    """One image, windows of 4: version 1, then 2; plain, then shifted."""
    for version in (1, 2):
        model = one_stage(library, version, feature_map, 8, 2, 4)
        yield from cases_of("small", model, 1, paths, (precision,))


@pytest.mark.parametrize(("library", "precision"), covering(LIBRARIES, ("fp32", "bf16")))
def test_every_path_agrees_with_float64(library: str, precision: str) -> None:
    """At a map that the window does not divide, too, where the library pads it."""
    for case in small_cases(library, (9, 8), precision=precision):
        assert Subject(case, "cpu").difference() < TOLERANCES[precision], case


def test_both_passes_are_timed_and_a_wrong_result_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = next(small_cases("native", (8, 8)))
    monkeypatch.setattr(benched, "set_precision", lambda request: None)
    forward, both = time_case(case, "cpu", 0.01, "here")
    assert forward.median > 0
    assert both.median > 0
    monkeypatch.setitem(TOLERANCES, "fp32", 1e-12)
    with pytest.raises(PlannerError, match=r"WRONG.*float64"):
        time_case(case, "cpu", 0.01, "here")
