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
def test_a_page_shows_everything_in_its_window(showcase: Path, tmp_path: Path, form: str) -> None:
    with looking_at(showcase, form) as page:
        take_picture(page, tmp_path, f"showcase-{form}")
        assert sideways(page) <= 0
        assert page.locator(".drawing .main-svg").count() > 0
        assert page.locator("[data-drawn]").count() == 2  # the others lie in a tab and in a fold
        for chart in page.locator("[data-drawn] .drawing").all():
            assert chart.bounding_box()["width"] <= FORMS[form]["viewport"]["width"]


@pytest.mark.parametrize("form", FORMS)
def test_every_text_is_readable_and_every_control_has_a_name(showcase: Path, form: str) -> None:
    with looking_at(showcase, form) as page:
        for fold in page.locator("summary:visible").all():
            fold.click()
        scroll_through(page)
        assert unreadable(page) == []
        assert nameless(page) == []
        page.locator("#theme").click()
        scroll_through(page)
        assert unreadable(page) == []


def test_too_little_contrast_and_a_missing_name_are_found(showcase: Path) -> None:
    with looking_at(showcase) as page:
        page.evaluate("document.querySelector('h1').style.color = '#999'")
        page.evaluate("document.querySelector('#theme').textContent = ''")
        assert len(unreadable(page)) == len(nameless(page)) == 1


def test_tabs_are_chosen_by_clicks_and_arrows(showcase: Path) -> None:
    with looking_at(showcase) as page:
        timm, lightning, deepspeed = page.locator("[role=tab]").all()
        assert [shown(page, n) for n in (1, 2, 3)] == [True, False, False]
        lightning.click()
        assert [shown(page, n) for n in (1, 2, 3)] == [False, True, False]
        page.keyboard.press("ArrowRight")
        assert deepspeed.get_attribute("aria-selected") == "true"
        assert page.evaluate("document.activeElement.textContent") == "DeepSpeed"
        chart = page.locator("#g1-files-3 .drawing")
        page.wait_for_selector("#g1-files-3 .main-svg")
        assert chart.locator(".main-svg").first.bounding_box()["width"] > 600
        page.keyboard.press("ArrowRight")
        assert timm.get_attribute("tabindex") == "0"
        assert deepspeed.get_attribute("tabindex") == "-1"
        page.keyboard.press("End")
        assert shown(page, 3)
        page.keyboard.press("Home")
        assert shown(page, 1)


def shown(page: Any, number: int) -> bool:
    visible: bool = page.locator(f"#g1-files-{number}").is_visible()
    return visible


def test_a_fold_opens_by_the_keyboard_and_draws_its_chart(showcase: Path) -> None:
    with looking_at(showcase) as page:
        fold = page.locator("summary", has_text="A chart of it")
        fold.focus()
        page.keyboard.press("Enter")
        page.wait_for_selector("details[open] .main-svg")
        width = page.locator("details[open] .main-svg").first.bounding_box()["width"]
        assert width > 600


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


def test_a_long_table_is_shown_page_by_page_sorted_whole_and_filtered(many_probes: Path) -> None:
    with looking_at(many_probes) as page:
        table = page.locator("figure.table").first
        first = table.locator("tbody td:first-child")
        counted = table.locator(".counted")
        earlier, later = table.locator(".pager button").all()
        assert earlier.is_disabled()
        later.click()
        until(page, "document.querySelector('tbody td').textContent === '101'")
        assert counted.inner_text() == "Rows 101–200 · 1,000 rows"
        assert first.count() == 100
        table.locator("th button").first.click()
        table.locator("th button").first.click()
        until(page, "document.querySelector('tbody td').textContent === '1,000'")
        assert first.all_inner_texts() == [f"{n:,}" for n in range(1000, 900, -1)]
        table.locator("input").fill("out MEMORY bf16")
        until(page, "document.querySelector('.counted').textContent.includes('match')")
        for row in table.locator("tbody tr").all_inner_texts():
            assert "out of memory" in row
            assert "bf16" in row
        table.locator("input").fill("no such row")
        until(page, "document.querySelector('.counted').textContent.startsWith('0 of')")
        assert first.count() == 0
        assert earlier.is_disabled()
        assert later.is_disabled()


def test_what_is_copied_is_the_text_and_it_is_said(showcase: Path) -> None:
    with looking_at(showcase) as page:
        text = page.locator("pre").first.text_content()
        page.locator("button.copy").first.click()
        until(page, "document.getElementById('said').textContent === 'Copied.'")
        assert page.evaluate("navigator.clipboard.readText()") == text
        assert page.locator("button.copy").first.inner_text().startswith("Copied")
        until(page, "document.querySelector('button.copy').innerText.startsWith('Copy')")


def test_without_a_clipboard_the_text_is_copied_from_a_field(showcase: Path) -> None:
    with looking_at(showcase) as page:
        page.evaluate(
            "() => { navigator.clipboard.writeText = () => Promise.reject(new Error()); }"
        )
        text = page.locator("pre").nth(1).text_content()
        page.locator("button.copy").nth(1).click()
        until(page, "document.getElementById('said').textContent === 'Copied.'")
        assert page.evaluate("navigator.clipboard.readText()") == text
        assert page.evaluate("document.activeElement.className") == "copy"


def test_where_nothing_may_be_copied_the_text_is_selected(showcase: Path) -> None:
    with looking_at(showcase) as page:
        page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(); }")
        page.evaluate("() => { document.execCommand = () => false; }")
        page.locator("button.copy").first.click()
        until(page, "document.getElementById('said').textContent.startsWith('Selected')")
        selected = page.evaluate("getSelection().toString()")
        assert selected.strip() == page.locator("pre").first.text_content()


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


def test_a_chart_out_of_sight_takes_the_colours_when_it_is_seen(tmp_path: Path) -> None:
    ink = "getComputedStyle(document.querySelector('[data-chart=g1-memory] .legendtext')).fill"
    with looking_at(written(pages.side_by_side(), tmp_path)) as page:
        scroll_through(page)
        light = page.evaluate(ink)
        page.evaluate("scrollTo({ top: document.body.scrollHeight, behavior: 'instant' })")
        until(page, "!page.near.has(document.querySelector('[data-chart=g1-memory]'))")
        page.evaluate("document.getElementById('theme').click()")
        assert page.evaluate(ink) == light
        page.locator("[data-chart=g1-memory]").scroll_into_view_if_needed()
        until(page, f"{ink} !== '{light}'")


def test_a_browser_that_keeps_nothing_for_files_changes_the_theme_all_the_same(
    showcase: Path, tmp_path: Path
) -> None:
    refused = "Object.defineProperty(window, 'sessionStorage', { get() { throw new Error(); } });"
    html = showcase.read_text(encoding="utf-8").replace(
        "<head>", f"<head><script>{refused}</script>"
    )
    path = tmp_path / "refused.html"
    path.write_text(html, encoding="utf-8")
    with looking_at(path) as page:
        page.locator("#theme").click()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_zoom_stays_when_the_theme_changes(showcase: Path) -> None:
    with looking_at(showcase) as page:
        scroll_through(page)
        zoomed = "document.querySelector('.js-plotly-plot').layout.xaxis.range"
        page.evaluate(
            "Plotly.relayout(document.querySelector('.js-plotly-plot'), {'xaxis.range': [20, 40]})"
        )
        page.locator("#theme").click()
        until(page, "page.isDark()")
        assert page.evaluate(zoomed) == [20, 40]


def test_a_chart_says_what_is_under_the_pointer(showcase: Path) -> None:
    with looking_at(showcase) as page:
        chart = page.locator("[data-chart=g1-memory]")
        chart.scroll_into_view_if_needed()
        settle(page)
        chart.locator(".nsewdrag").first.hover()
        page.wait_for_selector("[data-chart=g1-memory] .hoverlayer .legendtext")
        assert "activations" in chart.locator(".hoverlayer").text_content()


def test_the_skip_link_comes_first_and_focus_can_be_seen(showcase: Path) -> None:
    with looking_at(showcase) as page:
        page.keyboard.press("Tab")
        skip = page.locator(".skip")
        assert page.evaluate("document.activeElement.className") == "skip"
        until(page, "document.querySelector('.skip').getBoundingClientRect().top >= 0")
        assert skip.evaluate("e => getComputedStyle(e).outlineStyle") == "solid"
        page.keyboard.press("Enter")
        assert page.evaluate("location.hash") == "#main"
        reached = set()
        for _ in range(40):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.tagName"))
        assert {"BUTTON", "PRE", "SUMMARY", "INPUT", "DIV"} <= reached


def test_contents_say_where_one_is_and_fold_on_a_phone(showcase: Path) -> None:
    with looking_at(showcase) as page:
        page.locator("#list a", has_text="Launch it").click()
        until(page, "document.querySelector('#list [aria-current]')?.textContent === 'Launch it'")
    with looking_at(showcase, "narrow") as page:
        contents = page.locator("#contents")
        link = page.locator("#list a", has_text="Launch it")
        assert not link.is_visible()
        contents.click()
        assert contents.get_attribute("aria-expanded") == "true"
        link.click()
        assert not link.is_visible()


def test_print_shows_everything_and_no_buttons(showcase: Path, tmp_path: Path) -> None:
    with looking_at(showcase, "dark") as page:
        page.emulate_media(media="print", color_scheme="dark")
        until(page, "page.printing")
        settle(page)
        assert page.locator("[data-drawn]").count() == page.locator("[data-chart]").count() == 4
        assert page.locator(".alternative").all_inner_texts() == ["timm", "Lightning", "DeepSpeed"]
        for text in ("It needs ZeRO.", "The context takes 480 MiB.", "model: swin_tiny"):
            assert page.get_by_text(text).first.is_visible()
        for control in ("#theme", "button.copy", ".tools input", "nav", "[role=tablist]"):
            assert not page.locator(control).first.is_visible(), control
        assert page.evaluate("page.colour('--paper')") == "#ffffff"
        assert unreadable(page) == []
        page.emulate_media(media="screen", color_scheme="dark")
        until(page, "!page.printing")
        assert not page.locator("details[open]").count()
        assert print_page(page, tmp_path, "showcase").read_bytes().startswith(b"%PDF")


def test_charts_are_drawn_in_light_colours_and_as_wide_as_paper_before_printing(
    showcase: Path,
) -> None:
    ink = "getComputedStyle(document.querySelector('.legendtext')).fill"
    width = "Math.round(document.querySelector('.main-svg').getBoundingClientRect().width)"
    with looking_at(showcase, "dark") as page:
        scroll_through(page)
        dark, wide = page.evaluate(ink), page.evaluate(width)
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        until(page, f"{width} === page.PAPER_PX")
        assert page.evaluate(ink) == "rgb(26, 32, 39)" != dark
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        until(page, f"{width} === {wide}")
        assert page.evaluate(ink) == dark


@pytest.mark.parametrize("form", ["light", "narrow"])
def test_hostile_texts_do_nothing_and_are_shown(tmp_path: Path, form: str) -> None:
    path = written(pages.hostile(), tmp_path)
    with looking_at(path, form) as page:
        take_picture(page, tmp_path, f"hostile-{form}")
        assert sideways(page) <= 0
        assert (
            page.evaluate("document.querySelectorAll('img, [onerror], [onmouseover]').length") == 0
        )
        assert pages.HOSTILE[0] in page.locator("#g1-s0").inner_text()
        chart = page.locator("[data-chart=g1-k0-chart]")
        assert pages.HOSTILE[0] in chart.locator(".xtick").first.text_content()
        chart.locator(".nsewdrag").first.hover()
        page.wait_for_selector("[data-chart=g1-k0-chart] .hoverlayer .hovertext")
        page.locator("figure.table").last.locator(".pager button").last.click()
        until(
            page,
            "[...document.querySelectorAll('.counted')].at(-1).textContent.startsWith('Rows 101')",
        )
        assert page.locator("img").count() == 0


def test_without_scripts_texts_and_tables_are_read(showcase: Path, many_probes: Path) -> None:
    with looking_at_without_scripts(showcase) as page:
        for name in ("timm", "Lightning", "DeepSpeed"):
            assert page.locator(".alternative", has_text=name).is_visible()
        assert page.get_by_text("It needs ZeRO.").is_visible()
        assert page.locator("details.figures summary").first.is_visible()
        assert not page.locator("#theme, button.copy, [role=tablist]").first.is_visible()
    with looking_at_without_scripts(many_probes) as page:
        assert page.locator(".counted").first.inner_text() == "Rows 1–100 · 1,000 rows"
        assert page.locator("tbody").first.locator("tr").count() == 100


def looking_at_without_scripts(path: Path) -> Any:
    return looking_at(path, java_script_enabled=False)


def test_a_browser_that_cannot_unpack_is_told_so(many_probes: Path, tmp_path: Path) -> None:
    old = "<head><script>delete globalThis.DecompressionStream;</script>"
    path = tmp_path / "old.html"
    html = many_probes.read_text(encoding="utf-8").replace("<head>", old)
    path.write_text(html, encoding="utf-8")
    with looking_at(path) as page:
        assert "DecompressionStream" in page.locator(".failed").first.inner_text()
        assert page.locator("tbody").first.locator("tr").count() == 100
        page.locator("th button").first.click()  # the hundred rows that are there


def test_less_motion_is_wanted_and_nothing_moves(showcase: Path) -> None:
    smooth = "getComputedStyle(document.documentElement).scrollBehavior"
    with looking_at(showcase, reduced_motion="reduce") as page:
        assert page.evaluate(smooth) == "auto"
    with looking_at(showcase, reduced_motion="no-preference") as page:
        assert page.evaluate(smooth) == "smooth"
