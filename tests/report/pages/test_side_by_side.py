"""Several estimates on one page: the same figures as theirs, whatever differs, and however many."""

from __future__ import annotations

from typing import Any

import pytest

from planner.page.contents import Chart, Number, Section, Table
from planner.report.pages.differences import short_names, step_fields, telling
from planner.report.pages.side_by_side import best_text, fastest, steps_beside
from planner.report.pages.step import Step
from planner.units import GIB
from tests.report.pages.test_predicted_time import step_of


def grid(cards: tuple[str | None, ...], batches: tuple[int, ...], **fields: Any) -> list[Step]:
    return [step_of(card, batch_size=batch, **fields) for card in cards for batch in batches]


def part_of(sections: list[Section], key: str, kind: type) -> Any:
    (section,) = [section for section in sections if section.key == key]
    return next(part for part in section.parts if isinstance(part, kind))


def test_names_are_what_tells_steps_apart() -> None:
    names = short_names([step_fields(s) for s in grid(("rtx-4090", None), (2, 8))])
    assert names[0] == "rtx-4090, batch 2"
    assert names[3] == "no card, batch 8"
    only = short_names([step_fields(s) for s in grid(("rtx-4090",), (2, 8))])
    assert only == ["batch 2", "batch 8"]


def test_the_same_twice_is_told_by_its_number() -> None:
    steps = grid(("rtx-4090",), (2, 2))
    assert short_names([step_fields(step) for step in steps]) == ["#1", "#2"]
    assert telling([step_fields(step) for step in steps]) == [{}, {}]
    assert steps_beside(steps, "beside")


def test_another_model_is_told_by_its_title_and_an_image_size_by_itself() -> None:
    first, wider = step_of(), step_of(embed_dim=64, num_heads=(2, 4, 8, 16))
    assert "embed dim 64" in short_names([step_fields(first), step_fields(wider)])[1]


def test_memory_bars_are_what_each_needs_and_marks_what_its_card_has() -> None:
    steps = grid(("rtx-4090", "a100-sxm-80gb"), (2, 64))
    *bars, marks = part_of(steps_beside(steps, "beside"), "memory", Chart).figure.data
    for number, step in enumerate(steps):
        drawn = sum(bar.x[number] for bar in bars)
        assert drawn == pytest.approx(step.estimate.device_total_bytes / GIB)
        assert marks.x[number] == pytest.approx((step.estimate.budget_bytes or 0) / GIB)


def test_rates_have_their_range_and_their_verdict() -> None:
    steps = grid(("rtx-4090",), (2, 20_000), attention="eager")
    bars = part_of(steps_beside(steps, "beside"), "rates", Chart).figure.data
    assert [bar.name for bar in bars] == ["fits", "does not fit"]
    time = steps[0].estimate.throughput
    assert time is not None
    assert bars[0].x[0] == pytest.approx(time.all_images_per_second)
    assert bars[0].error_x.array[0] == pytest.approx(time.uncertainty * time.all_images_per_second)


def test_the_fastest_that_fits_is_marked_and_said() -> None:
    steps = grid(("rtx-4090",), (2, 64, 20_000), attention="eager")
    assert fastest(steps) == 1
    assert part_of(steps_beside(steps, "beside"), "estimates", Table).marked == [1]
    assert best_text(steps).startswith("2 of 3 fit. The fastest that fits is batch 64: ")
    assert best_text(steps[:2]).startswith("All 2 fit. The fastest is batch 64: ")


def test_where_nothing_fits_the_least_is_said() -> None:
    steps = grid(("rtx-4090",), (20_000, 30_000), attention="eager")
    assert fastest(steps) is None
    assert best_text(steps).startswith(
        "None of 2 fits. The one with the least, batch 20000, needs "
    )


def test_prices_are_of_steps_that_differ_in_one_thing_only() -> None:
    steps = [
        step_of(batch_size=batch, checkpointing=checkpointing)
        for batch in (2, 64)
        for checkpointing in ("none", "blocks")
    ]
    rows = part_of(steps_beside(steps, "beside"), "prices", Table).rows
    assert [row[0] for row in rows] == [
        "batch size",
        "batch size",
        "checkpointing",
        "checkpointing",
    ]
    less = rows[3][4]
    assert isinstance(less, Number)
    saved = steps[3].estimate.device_total_bytes - steps[2].estimate.device_total_bytes
    assert less.value == saved < 0
    assert rows[3][1:4] == ["none", "blocks", "batch size 64"]


def test_every_row_has_every_column_without_a_card_and_with_one() -> None:
    steps = grid(("rtx-4090", None), (2, 8))
    for section in steps_beside(steps, "beside"):
        for part in section.parts:
            if isinstance(part, Table):
                assert {len(row) for row in part.rows} == {len(part.headers)}
