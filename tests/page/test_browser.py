"""The page as a person uses it, in Chromium: looks, clicks, keys, copying, print."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planner.report.page.contents import Page
from planner.report.page.rendering import page_html
from tests.page import pages
from tests.page.browser import (
    FORMS,
    looking_at,
    nameless,
    print_page,
    scroll_through,
    settle,
    sideways,
    take_picture,
    unreadable,
    until,
)

pytestmark = pytest.mark.browser


def written(page: Page, folder: Path) -> Path:
    path = folder / "page.html"
    path.write_text(page_html(page), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def showcase(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(pages.showcase(), tmp_path_factory.mktemp("showcase"))


@pytest.fixture(scope="module")
def many_probes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(pages.many_probes(1000, 1), tmp_path_factory.mktemp("many"))


@pytest.mark.parametrize("form", FORMS)
def test_a_page_shows_everything_readable_in_its_window(
    showcase: Path, tmp_path: Path, form: str
) -> None:
    with looking_at(showcase, form) as page:
        take_picture(page, tmp_path, f"showcase-{form}")
        assert sideways(page) <= 0
        assert page.locator(".drawing .main-svg").count() > 0
        assert page.locator("[data-drawn]").count() == 2  # the others lie in folds
        for chart in page.locator("[data-drawn] .drawing").all():
            assert chart.bounding_box()["width"] <= FORMS[form]["viewport"]["width"]
        for fold in page.locator("summary:visible").all():
            fold.click()
        scroll_through(page)
        assert unreadable(page) == []
        assert nameless(page) == []


def test_a_fold_is_opened_by_the_keyboard_and_its_chart_is_drawn(showcase: Path) -> None:
    with looking_at(showcase) as page:
        page.locator("summary", has_text="A chart of it").focus()
        page.keyboard.press("Enter")
        page.wait_for_selector("details[open] .main-svg")
        assert page.locator("details[open] .main-svg").first.bounding_box()["width"] > 600


def test_a_table_sorts_by_its_headers(showcase: Path) -> None:
    with looking_at(showcase) as page:
        table = page.locator("figure.table:not(details *)").first
        header = table.locator("th").nth(7)
        header.locator("button").focus()
        page.keyboard.press("Enter")
        assert header.get_attribute("aria-sort") == "ascending"
        rates = [cell(text) for text in table.locator("td:nth-child(8)").all_inner_texts()]
        assert rates == sorted(rates)
        assert rates[0] == -1  # what is not known comes first
        header.locator("button").click()
        assert header.get_attribute("aria-sort") == "descending"
        rates = [cell(text) for text in table.locator("td:nth-child(8)").all_inner_texts()]
        assert rates == sorted(rates, reverse=True)
        names = table.locator("th").nth(5)
        names.locator("button").click()
        assert header.get_attribute("aria-sort") == "none"
        texts = table.locator("td:nth-child(6)").all_inner_texts()
        assert texts == sorted(texts)
        assert table.locator("tr.marked td").first.inner_text() == "3"


def cell(text: str) -> float:
    return -1.0 if text == "-" else float(text.replace(",", ""))


def test_a_long_table_is_filtered(many_probes: Path) -> None:
    with looking_at(many_probes) as page:
        table = page.locator("figure.table").first
        assert table.locator(".counted").inner_text() == "1,000 rows"
        table.locator("input").fill("out MEMORY bf16")
        until(page, "document.querySelector('.counted').textContent.includes('match')")
        for row in table.locator("tbody tr").all_inner_texts():
            assert "out of memory" in row
            assert "bf16" in row
        table.locator("input").fill("no such row")
        until(page, "document.querySelector('.counted').textContent.startsWith('0 of')")
        assert table.locator("tbody tr").count() == 0


def test_what_is_copied_is_the_text_and_it_is_said(showcase: Path) -> None:
    with looking_at(showcase) as page:
        text = page.locator("pre").first.text_content()
        page.locator("button.copy").first.click()
        until(page, "document.getElementById('said').textContent === 'Copied.'")
        assert page.evaluate("navigator.clipboard.readText()") == text
        assert page.locator("button.copy").first.inner_text().startswith("Copied")
        until(page, "document.querySelector('button.copy').innerText.startsWith('Copy')")


def test_the_theme_is_kept_for_the_visit_and_colours_the_charts(showcase: Path) -> None:
    with looking_at(showcase) as page:
        scroll_through(page)
        ink = "getComputedStyle(document.querySelector('.legendtext')).fill"
        light = page.evaluate(ink)
        button = page.locator("#theme")
        assert button.inner_text() == "Dark theme"
        button.click()
        until(page, f"{ink} !== '{light}'")
        assert button.inner_text() == "Light theme"
        page.reload()
        settle(page)
        assert button.inner_text() == "Light theme"


def test_print_shows_everything_and_no_buttons(showcase: Path, tmp_path: Path) -> None:
    with looking_at(showcase, "dark") as page:
        page.emulate_media(media="print", color_scheme="dark")
        until(page, "page.printing")
        settle(page)
        assert page.locator("[data-drawn]").count() == page.locator("[data-chart]").count() == 4
        assert page.get_by_text("The context takes 480 MiB.").first.is_visible()
        for control in ("#theme", "button.copy", ".tools input", "nav"):
            assert not page.locator(control).first.is_visible(), control
        assert page.evaluate("page.colour('--paper')") == "#ffffff"
        assert unreadable(page) == []
        page.emulate_media(media="screen", color_scheme="dark")
        until(page, "!page.printing")
        assert not page.locator("details[open]").count()
        assert print_page(page, tmp_path, "showcase").read_bytes().startswith(b"%PDF")


def test_hostile_texts_do_nothing_and_are_shown(tmp_path: Path) -> None:
    path = written(pages.hostile(), tmp_path)
    with looking_at(path, "narrow") as page:
        take_picture(page, tmp_path, "hostile")
        assert sideways(page) <= 0
        assert (
            page.evaluate("document.querySelectorAll('img, [onerror], [onmouseover]').length") == 0
        )
        assert pages.HOSTILE[0] in page.locator("#g1-s0").inner_text()
        chart = page.locator("[data-chart=g1-k0-chart]")
        assert pages.HOSTILE[0] in chart.locator(".xtick").first.text_content()
        chart.locator(".nsewdrag").first.hover()
        page.wait_for_selector("[data-chart=g1-k0-chart] .hoverlayer .hovertext")
        assert page.locator("img").count() == 0


def test_without_scripts_texts_and_tables_are_read(showcase: Path, many_probes: Path) -> None:
    with looking_at_without_scripts(showcase) as page:
        assert page.locator("details.figures summary").first.is_visible()
        assert not page.locator("#theme, button.copy").first.is_visible()
    with looking_at_without_scripts(many_probes) as page:
        assert page.locator("tbody").first.locator("tr").count() == 1000


def looking_at_without_scripts(path: Path) -> Any:
    return looking_at(path, java_script_enabled=False)
