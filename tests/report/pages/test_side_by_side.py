"""Several estimates on one page: the same figures as theirs, whatever differs, and however many."""

from __future__ import annotations

from typing import Any

import pytest

from planner.core.units import GIB
from planner.report.page.contents import Chart, Section, Table
from planner.report.pages.side_by_side import (
    best_text,
    fastest,
    short_names,
    steps_beside,
)
from planner.report.pages.step import Step
from tests.report.pages.test_predicted_time import step_of


def grid(cards: tuple[str | None, ...], batches: tuple[int, ...], **fields: Any) -> list[Step]:
    return [step_of(card, batch_size=batch, **fields) for card in cards for batch in batches]


def part_of(sections: list[Section], key: str, kind: type) -> Any:
    (section,) = [section for section in sections if section.key == key]
    return next(part for part in section.parts if isinstance(part, kind))


def test_names_are_what_tells_steps_apart() -> None:
    names = short_names(grid(("rtx-4090", None), (2, 8)))
    assert names[0] == "rtx-4090, batch 2"
    assert names[3] == "no card, batch 8"
    only = short_names(grid(("rtx-4090",), (2, 8)))
    assert only == ["batch 2", "batch 8"]


def test_bars_are_what_each_needs_and_how_fast_it_is() -> None:
    steps = grid(("rtx-4090", "a100-sxm-80gb"), (2, 20_000), attention="eager")
    sections = steps_beside(steps, "beside")
    memory, limits, rates = part_of(sections, "estimates", Chart).figure.data
    table = part_of(sections, "estimates", Table)
    found = [row[table.headers.index("Fits")] for row in table.rows]
    assert [cell.kind for cell in found] == ["fits", "no", "fits", "fits"]
    for number, step in enumerate(steps):
        found, time = step.estimate, step.estimate.throughput
        assert time is not None
        assert memory.x[number] == pytest.approx(found.device_total_bytes / GIB)
        assert limits.x[number] == pytest.approx((found.budget_bytes or 0) / GIB)
        if not found.fits:
            assert not rates.x[number] > 0, "what does not fit does not run"
            continue
        assert rates.x[number] == pytest.approx(time.all_images_per_second)
        reach = time.uncertainty * time.all_images_per_second
        assert rates.error_x.array[number] == pytest.approx(reach)
        assert rates.error_x.arrayminus[number] == pytest.approx(reach)


def test_the_fastest_that_fits_is_marked_and_said() -> None:
    steps = grid(("rtx-4090",), (2, 64, 20_000), attention="eager")
    assert fastest(steps) == 1
    assert part_of(steps_beside(steps, "beside"), "estimates", Table).marked == [1]
    assert best_text(steps).startswith("2 of 3 fit. The fastest that fits is batch 64: ")
    assert best_text(steps[:2]).startswith("All 2 fit. The fastest is batch 64: ")


def test_every_row_has_every_column_without_a_card_and_with_one() -> None:
    steps = grid(("rtx-4090", None), (2, 8))
    for section in steps_beside(steps, "beside"):
        for part in section.parts:
            if isinstance(part, Table):
                assert {len(row) for row in part.rows} == {len(part.headers)}
