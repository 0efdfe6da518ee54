"""The step's chart in Chromium: what is drawn after zooming is what the ledger says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.core.units import GIB, MIB
from planner.report.page.contents import Page
from planner.report.page.rendering import page_html
from planner.report.pages.course import Course, step_course
from planner.report.pages.sections import step_group
from planner.report.pages.step import Step
from tests.page.browser import looking_at, until
from tests.report.pages.test_memory import hostile_step, swin_step

pytestmark = pytest.mark.browser

FIGURE = "[data-chart=g1-memory-chart]"
CHART = f'document.querySelector("{FIGURE} .drawing")'


def written(step: Step, folder: Path) -> Path:
    path = folder / "report.html"
    page = Page("Swin-T", "", [step_group(step, "g1")])
    path.write_text(page_html(page), encoding="utf-8")
    return path


@pytest.fixture
def course() -> Course:
    return step_course(swin_step("fsdp"))


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Any]:
    with looking_at(written(swin_step("fsdp"), tmp_path)) as page:
        page.locator(FIGURE).scroll_into_view_if_needed()
        until(page, f"{CHART}.dataset.resampled >= 1")
        yield page


def drawn(page: Any, series: str) -> tuple[list[float], list[float]]:
    """x and y of a trace of the chart, as they are drawn now."""
    x, y = page.evaluate(
        f"""() => {{
          const trace = {CHART}.data.find((each) => each.meta.series === "{series}");
          return [Array.from(trace.x), Array.from(trace.y)];
        }}"""
    )
    return x, y


def after(page: Any, act: Any) -> None:
    """What an action draws is drawn."""
    before = page.evaluate(f"() => Number({CHART}.dataset.resampled)")
    act()
    until(page, f"Number({CHART}.dataset.resampled) > {before}")


def hovered(page: Any) -> str:
    """What the pointer says, its lines with spaces between."""
    lines = page.locator(f"{FIGURE} .hoverlayer tspan").all_text_contents()
    return " ".join(" ".join(lines).split())


def check_drawn(page: Any, course: Course, start: int, stop: int) -> None:
    """Each course's maximum from `start` to `stop` is the drawn one, and what is drawn is true."""
    live = course.live
    scale = GIB if max(course.reserved) >= GIB else MIB
    for series, values in (("live", live.total), ("reserved", course.reserved)):
        x, y = drawn(page, series)
        assert y == [values[int(point)] / scale for point in x]
        within = [value for point, value in zip(x, y, strict=True) if start <= point <= stop]
        assert max(within) == max(values[start : stop + 1]) / scale
        assert x[0] <= start
        assert x[-1] >= stop


def test_the_whole_step_is_drawn_and_what_is_zoomed_into_resampled(
    page: Any, course: Course
) -> None:
    check_drawn(page, course, 0, len(course.live.total) - 1)
    x, _ = drawn(page, "live")
    width = page.evaluate(f"() => {CHART}._fullLayout._size.w")
    assert 0.5 * width < len(x) <= 2 * width + 2 < len(course.live.total)
    assert page.evaluate(f"() => {CHART}._context.plotlyServerURL") == "", "it is sent nowhere"
    start, stop = 700, 1100
    zoom = f"() => Plotly.relayout({CHART}, {{'xaxis.range': [{start}, {stop}]}})"
    after(page, lambda: page.evaluate(zoom))
    check_drawn(page, course, start, stop)
    x, _ = drawn(page, "live")
    # So near, every point is drawn.
    assert x == list(range(start - 1, stop + 1))
    # Dragging over the chart zooms too, and a double click leads back.
    box = page.locator(f"{FIGURE} .nsewdrag").first.bounding_box()
    middle = box["y"] + box["height"] / 2

    def drag() -> None:
        page.mouse.move(box["x"] + 0.25 * box["width"], middle)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.75 * box["width"], middle, steps=4)
        page.mouse.up()

    after(page, drag)
    low, high = page.evaluate(f"() => {CHART}.layout.xaxis.range")
    assert start < low < high < stop
    check_drawn(page, course, round(low) + 1, round(high) - 1)
    after(page, lambda: page.mouse.dblclick(box["x"] + 0.5 * box["width"], middle))
    check_drawn(page, course, 0, len(course.live.total) - 1)


def test_the_pointer_says_what_happens(page: Any, course: Course) -> None:
    peak = course.live.peak
    place = f"""() => {{
      const chart = {CHART}, box = chart.getBoundingClientRect(), axis = chart._fullLayout.xaxis;
      return [box.x + axis._offset + axis.d2p({peak}), box.y + 200];
    }}"""
    after(page, lambda: page.evaluate(
        f"() => Plotly.relayout({CHART}, {{'xaxis.range': [{peak - 30}, {peak + 30}]}})"
    ))  # fmt: skip
    page.mouse.move(*page.evaluate(place))
    page.wait_for_selector(f"{FIGURE} .hoverlayer .hovertext")
    said = hovered(page)
    move = course.moves[peak - 1]
    assert f"event {peak:,} of {len(course.moves):,}" in said
    assert f"of {move.category.replace('_', ' ')}" in said
    assert move.path in said
    assert move.label.removeprefix("aten.") in said
    assert "reserved" in said


def test_hostile_names_are_text_under_the_pointer(tmp_path: Path) -> None:
    with looking_at(written(hostile_step(), tmp_path)) as page:
        page.locator(FIGURE).scroll_into_view_if_needed()
        until(page, f"{CHART}.dataset.resampled === '1'")
        box = page.locator(f"{FIGURE} .nsewdrag").first.bounding_box()
        page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 0.5 * box["height"])
        page.wait_for_selector(f"{FIGURE} .hoverlayer .hovertext")
        assert "<img src=x" in hovered(page)
        assert page.locator("img").count() == 0
