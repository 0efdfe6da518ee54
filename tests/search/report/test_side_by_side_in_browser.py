"""The page of several subjects as a person uses it, in Chromium."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from search.report.output import write_page
from search.report.writing import make_page
from tests.page.browser import (
    FORMS,
    looking_at,
    nameless,
    settle,
    sideways,
    take_picture,
    unreadable,
    until,
)
from tests.search.report.test_side_by_side import MODEL, record, run_of, step_with

pytestmark = pytest.mark.browser
HOSTILE = "<script>alert(1)</script>\x1b[31m"


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = MODEL.model_copy(update={"name": HOSTILE})
    runs = [run_of(f"{HOSTILE}-{n}", record(8 * n, model), record(8)) for n in (1, 2)]
    steps = [step_with(8), step_with(64), step_with(8, world_size=2, parallelism="ddp")]
    page = make_page([*steps, *runs])
    return write_page(page, tmp_path_factory.mktemp("beside") / "page.html")


def shown_chart(page: Any, key: str) -> Any:
    chart = page.locator(f"[data-chart={key}]")
    chart.scroll_into_view_if_needed()
    chart.locator(".main-svg").first.wait_for()
    settle(page)
    return chart


@pytest.mark.parametrize("form", FORMS)
def test_several_subjects_are_readable_in_every_window(
    page_file: Path, tmp_path: Path, form: str
) -> None:
    with looking_at(page_file, form) as page:
        take_picture(page, tmp_path, f"beside-{form}")
        assert sideways(page) <= 0
        assert unreadable(page) == []
        assert nameless(page) == []


def test_a_bar_says_its_figures_and_a_link_leads_to_its_subject(page_file: Path) -> None:
    with looking_at(page_file) as page:
        chart = shown_chart(page, "beside-rates")
        box = chart.locator(".bars .point").first.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=4)
        said = chart.locator(".hoverlayer .hovertext").first
        said.wait_for()
        assert "fits" in said.text_content()
        page.locator(".links a", has_text="batch 64").click()
        until(page, "location.hash === '#g2'")


def test_a_module_is_looked_into_with_a_click(page_file: Path) -> None:
    with looking_at(page_file) as page:
        tree = shown_chart(page, "g1-time-modules")
        tree.locator(".slice", has_text="layers.0").first.click()
        drawing = "document.querySelector('[data-chart=g1-time-modules] .drawing')"
        until(page, f"{drawing}.data[0].level !== undefined")
