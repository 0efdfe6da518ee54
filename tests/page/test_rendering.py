"""What is in a page is what it was given, as text, whoever wrote it."""

import hashlib
import itertools
import math
from functools import cache
from pathlib import Path

import pytest

from planner.core.errors import printable
from planner.report.page import contents, rendering
from planner.report.page.contents import Group, Number, Page, Section, Table, Text, Verdict
from planner.report.page.plotting import CYCLE, LIMIT, MAX_LABEL, STEEL, bar_chart, plot_text
from planner.report.page.rendering import page_html
from planner.report.pages import make_page
from search.runs import report_estimate
from tests.page import pages
from tests.page.reading import read_page, unpacked


def page_of(*parts: object) -> Page:
    return Page("A title", [Group("g1", "", [Section("one", "One", parts)])])  # type: ignore[arg-type]


@cache
def real_page() -> Page:
    """What `planner report` draws of two estimates."""
    return make_page([report_estimate("native:swin_tiny", batch_size=n) for n in (8, 16)])


@pytest.mark.parametrize("text", pages.HOSTILE, ids=lambda text: ascii(text)[:24])
def test_a_hostile_text_changes_no_element_and_adds_no_attribute(text: str) -> None:
    """The page of any text has the elements that the page of a harmless one has."""
    hostile = read_page(page_html(pages.hostile([text, text])))
    harmless = read_page(page_html(pages.hostile(["harmless", "harmless"])))
    assert [e.tag for e in hostile.all()] == [e.tag for e in harmless.all()]
    known = {name for element in harmless.all() for name in element.attributes} | {"class"}
    assert {name for element in hostile.all() for name in element.attributes} <= known
    scripts, harmless_scripts = hostile.all("script"), harmless.all("script")
    for one, other in zip(scripts, harmless_scripts, strict=True):
        assert one.text == other.text or one.attributes["id"] == "packed-charts"


@pytest.mark.parametrize("text", pages.HOSTILE, ids=lambda text: ascii(text)[:24])
def test_a_hostile_text_is_read_letter_by_letter_in_every_part(text: str) -> None:
    root, shown = read_page(page_html(pages.hostile([text]))), printable(text)
    section = root.one("section", id="g1-s0")
    assert shown in section.one("p", **{"class": "verdict likely"}).text
    for kind in ("plain", "lead", "note", "warning"):
        assert section.all("p", **{"class": kind})[0].text == shown
    for tag in ("h3", "dt", "dd", "pre", "summary", "figcaption", "td", "span"):
        assert section.all(tag)[0].text == shown, tag
    for tag in ("th", "button"):
        assert shown in [element.text for element in section.all(tag)], tag
    assert root.one("title").text == root.one("h1").text == root.one("footer").text == shown
    assert [link.text for link in root.one("nav").all("a")] == [shown] * 3
    labels = [element.attributes.get("aria-label") for element in section.all()]
    assert {label for label in labels if label is not None} == {shown}
    figure = unpacked(root, "charts")["g1-k0-chart"]["figure"]
    assert figure["data"][0]["name"] == figure["layout"]["title"]["text"] == plot_text(text)
    assert "<" not in plot_text(text)


def test_no_letter_of_a_page_is_a_control_or_turns_the_direction() -> None:
    html = page_html(pages.hostile())
    written = html.partition("<body>")[2].partition("<script")[0]
    assert printable(written) == written
    html.encode()  # no lone surrogate


def test_a_long_label_is_cut_before_its_signs_are_escaped() -> None:
    cut = plot_text("<" * 1000)
    assert cut == "&lt;" * (MAX_LABEL - 1) + "…"


def test_anchors_lead_somewhere_ids_are_unique_and_headings_go_down_one_level_at_a_time() -> None:
    for page in (real_page(), pages.hostile()):
        root = read_page(page_html(page))
        ids = [element.attributes["id"] for element in root.all() if "id" in element.attributes]
        assert len(ids) == len(set(ids))
        for element in root.all():
            for name in ("aria-labelledby", "aria-controls"):
                assert element.attributes.get(name, ids[0]) in ids
        assert {link.attributes["href"][1:] for link in root.all("a")} <= set(ids)
        levels = [int(e.tag[1]) for e in root.all() if e.tag in ("h1", "h2", "h3", "h4")]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_a_short_table_is_whole_in_the_page() -> None:
    unknown = (None, math.nan, math.inf, -math.inf)  # or not finite
    rates = [Number(2.5, "2.5 /s"), *(Number(value, "") for value in unknown)]
    table = Table(("Name", "Rate"), [("a", rate) for rate in rates], "", [1])
    root = read_page(page_html(page_of(table)))
    rows = root.one("tbody").all("tr")
    assert [[cell.text for cell in row.all("td")] for row in rows] == [
        ["a", "2.5 /s"], *[["a", "-"]] * 4
    ]  # fmt: skip
    assert [row.all("td")[1].attributes["data-value"] for row in rows] == ["2.5", *[""] * 4]
    assert [row.attributes.get("class") for row in rows[:3]] == [None, "marked", None]


def test_plotly_is_its_makers_bundle_byte_for_byte() -> None:
    """`npm pack plotly.js-basic-dist-min@4.1.1`."""
    found = (Path(rendering.__file__).parent / "assets" / rendering.PLOTLY).read_bytes()
    assert b"Licensed under the MIT license" in found[:300]
    digest = "99784e3abfb07b142a15e521a439e6d9addceadb3f79553fd24c72774f0649ba"
    assert hashlib.sha256(found).hexdigest() == digest


def test_a_chart_s_figures_are_a_table_without_a_script() -> None:
    rates, ranges = {"a": 1.5, "b": 20_000.0}, [(1.0, 2.0), None]
    chart = bar_chart("g1-c", "Rates", rates, "images/s", ranges, [3.0])
    root = read_page(page_html(page_of(chart)))
    found = root.one("details", **{"class": "figures unprinted"}).one("tbody").all("tr")
    assert [[cell.text for cell in row.all("td")] for row in found] == [
        ["a", "1.5"],
        ["b", "20,000"],
    ]
    assert list(chart.figure.data[0].error_x.array) == [0.5, 0.0]


def test_a_verdict_is_an_icon_a_word_and_a_kind() -> None:
    cells = [[Verdict(kind)] for kind in contents.VERDICTS]
    root = read_page(page_html(page_of(Table(["Fits"], cells), Verdict("no", "By 2 GiB."))))
    said = {cell.attributes["class"]: cell.text for cell in root.one("tbody").all("td")}
    assert len(set(said.values())) == len(said) == len(contents.VERDICTS)
    assert root.one("p", **{"class": "verdict no"}).text == "✕Does not fit By 2 GiB."


def test_a_page_without_charts_carries_no_plotly_and_is_small() -> None:
    assert len(page_html(real_page()).encode()) < 1_000_000
    html = page_html(page_of(Text("Only text.")))
    assert "packed-plotly" not in html
    assert len(html) < 60_000


def test_a_page_forbids_every_request_and_names_no_other_place() -> None:
    html = page_html(real_page())
    assert "default-src 'none'" in html
    root = read_page(html)
    for element in root.all():
        assert not element.attributes.get("src")
        assert element.attributes.get("href", "#").startswith(("#", "data:"))


def luminance(colour: str) -> float:
    """The relative luminance of `#rrggbb`, as WCAG 2.2 defines it."""
    shares = (int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_every_colour_of_a_chart_stands_out_from_every_ground() -> None:
    """WCAG 2.2, 1.4.11: a contrast of 3 with what lies beside it."""
    grounds = ("#ffffff", "#f5f7f9", "#171c22", "#0f1317")
    for colour, ground in itertools.product((*CYCLE, LIMIT, STEEL), grounds):
        lighter, darker = sorted((luminance(colour), luminance(ground)), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 3, colour


def test_a_column_of_which_no_row_says_anything_is_left_out() -> None:
    rows = [["a", Number(None, "-"), "-", Number(0, "0")], ["-", Number(None, "-"), "-", "-"]]
    table = Table(["one", "two", "three", "four"], rows, "said", (1,)).compact()
    assert table == Table(["one", "four"], [["a", Number(0, "0")], ["-", "-"]], "said", (1,))
    assert Table(["one"], []).compact().headers == ["one"], "which says that there are no rows"
