"""The pages of `planner report` as a person uses them, in Chromium: looks, clicks, keys, copying,
print; of an estimate, several, and a search."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from planner.cli import cli
from planner.report.page.rendering import page_html
from tests.page import pages
from tests.page.browser import (
    FORMS,
    looking_at,
    nameless,
    scroll_through,
    settle,
    sideways,
    unreadable,
    until,
)
from tests.report.test_searches import ended
from tests.search.replays import leave_run
from tests.search.tables import invented_table

pytestmark = pytest.mark.browser
MODEL = "native:swin_tiny"
SUBJECTS = {
    "estimate": [MODEL, "--gpu", "a100-sxm-80gb", "--gpus", "4", "--checkpointing", "stages"],
    "several": ["run", MODEL, "--gpu", "h100-sxm-80gb,rtx-3090"],
    "run": ["run"],
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of each of SUBJECTS; some probes of the run ended out of memory."""
    folder = tmp_path_factory.mktemp("reports")
    records = [
        ended(record, "out_of_memory", "CUDA out of memory") if number % 5 == 2 else record
        for number, record in enumerate(invented_table())
    ]
    run = leave_run(folder / "run", records, tolerance=0.0, headroom=0.3)
    for name, subjects in SUBJECTS.items():
        targets = [str(run) if subject == "run" else subject for subject in subjects]
        command = ["report", *targets, "--output", str(folder / f"{name}.html")]
        done = CliRunner().invoke(cli, command)
        assert done.exit_code == 0, done.output
    return {name: folder / f"{name}.html" for name in SUBJECTS}


@pytest.mark.parametrize(("name", "form"), zip(SUBJECTS, FORMS, strict=True))
def test_a_page_shows_everything_readable_in_its_window(
    reports: dict[str, Path], name: str, form: str
) -> None:
    with looking_at(reports[name], form) as page:
        for fold in page.locator("summary:visible").all():
            fold.click()
        scroll_through(page)
        assert sideways(page) <= 0
        assert page.locator("[data-drawn]").count() > 1
        for chart in page.locator("[data-drawn] .drawing:visible").all():
            assert chart.bounding_box()["width"] <= FORMS[form]["viewport"]["width"]
        assert unreadable(page) == []
        assert nameless(page) == []
        page.set_viewport_size({"width": 1200, "height": 900})
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        over = page.evaluate(  # a table of ten columns or more scrolls in its box
            """() => [...document.querySelectorAll("figure.table .scroll")]
              .filter((box) => box.querySelectorAll("th").length < 10)
              .filter((box) => box.scrollWidth > box.clientWidth)
              .map((box) => box.textContent.slice(0, 80))"""
        )
        assert over == []


def test_a_fold_is_opened_by_the_keyboard_and_its_chart_is_drawn(reports: dict[str, Path]) -> None:
    with looking_at(reports["several"]) as page:
        page.locator("summary", has_text="rtx-3090").focus()
        page.keyboard.press("Enter")
        page.locator("details[open] [data-chart]").first.scroll_into_view_if_needed()
        page.wait_for_selector("details[open] .main-svg")
        assert page.locator("details[open] .main-svg").first.bounding_box()["width"] > 600


def test_a_table_sorts_by_its_headers_and_is_filtered(reports: dict[str, Path]) -> None:
    with looking_at(reports["run"]) as page:
        table = page.locator("figure.table", has=page.locator(".counted"))
        marked = table.locator("tr.marked td").first.inner_text()
        header = table.locator("th").nth(1)
        header.locator("button").focus()
        page.keyboard.press("Enter")
        assert header.get_attribute("aria-sort") == "ascending"
        rates = [cell(text) for text in table.locator("td:nth-child(2)").all_inner_texts()]
        assert rates == sorted(rates)
        assert rates[0] == -1  # what is not known comes first
        header.locator("button").click()
        assert header.get_attribute("aria-sort") == "descending"
        rates = [cell(text) for text in table.locator("td:nth-child(2)").all_inner_texts()]
        assert rates == sorted(rates, reverse=True)
        names = table.locator("th").nth(6)
        names.locator("button").click()
        assert header.get_attribute("aria-sort") == "none"
        texts = table.locator("td:nth-child(7)").all_inner_texts()
        assert texts == sorted(texts)
        assert table.locator("tr.marked td").first.inner_text() == marked
        num_rows = table.locator("tbody tr").count()
        assert table.locator(".counted").inner_text() == f"{num_rows} rows"
        table.locator("input").fill("out MEMORY bf16")
        until(page, "document.querySelector('.counted').textContent.includes('match')")
        found = table.locator("tbody tr").all_inner_texts()
        assert 0 < len(found) < num_rows
        assert all("out of memory" in row and "bf16" in row for row in found)
        table.locator("input").fill("no such row")
        until(page, "document.querySelector('.counted').textContent.startsWith('0 of')")
        assert table.locator("tbody tr").count() == 0


def cell(text: str) -> float:
    return -1.0 if text == "-" else float(text.split()[0].replace(",", ""))


def test_what_is_copied_is_the_text_and_it_is_said(reports: dict[str, Path]) -> None:
    with looking_at(reports["run"]) as page:
        text = page.locator("pre").first.text_content()
        page.locator("button.copy").first.click()
        until(page, "document.getElementById('said').textContent === 'Copied.'")
        assert page.evaluate("navigator.clipboard.readText()") == text
        assert page.locator("button.copy").first.inner_text().startswith("Copied")
        until(page, "document.querySelector('button.copy').innerText.startsWith('Copy')")


def test_the_theme_is_kept_for_the_visit_and_colours_the_charts(reports: dict[str, Path]) -> None:
    with looking_at(reports["estimate"]) as page:
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


@pytest.mark.parametrize("name", ["estimate", "run"])
def test_print_shows_everything_and_no_buttons(reports: dict[str, Path], name: str) -> None:
    with looking_at(reports[name], "dark") as page:
        page.emulate_media(media="print", color_scheme="dark")
        until(page, "page.printing")
        settle(page)
        assert page.locator("[data-drawn]").count() == page.locator("[data-chart]").count() > 1
        for fold in page.locator("details:not(.unprinted) > :nth-child(2)").all():
            assert fold.is_visible()
        for control in ("#theme", "button.copy", ".tools input", "nav"):
            assert not page.locator(control).first.is_visible(), control
        assert page.evaluate("page.colour('--paper')") == "#ffffff"
        assert unreadable(page) == []
        page.emulate_media(media="screen", color_scheme="dark")
        until(page, "!page.printing")
        assert not page.locator("details[open]").count()
        assert page.pdf(format="A4", print_background=True).startswith(b"%PDF")


def test_hostile_texts_do_nothing_and_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page_html(pages.hostile()), encoding="utf-8")
    with looking_at(path, "narrow") as page:
        scroll_through(page)
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


def test_without_scripts_texts_and_tables_are_read(reports: dict[str, Path]) -> None:
    with looking_at(reports["estimate"], java_script_enabled=False) as page:
        assert page.locator("details.figures summary").first.is_visible()
        assert not page.locator("#theme, button.copy").first.is_visible()
    with looking_at(reports["run"], java_script_enabled=False) as page:
        assert page.locator("tbody tr").count() > 20
