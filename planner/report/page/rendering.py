"""A page as one HTML file that needs nothing else: style, scripts, plotly and data lie within.

Plotly's script and the figures are compressed.
Browsers have unpacked gzip by themselves since 2023. A security policy in the page keeps it from
asking anybody for anything.
"""

from __future__ import annotations

import base64
import gzip
import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.core.errors import printable
from planner.report.page import contents as doc

if TYPE_CHECKING:
    from jinja2 import Environment

_HERE = Path(__file__).parent
_GENERATOR = "planner report"
# Plotly's own smallest bundle, byte for byte as `npm pack plotly.js-basic-dist-min@4.1.1` has it
# (MIT; tests/page holds its digest): the pip package has only the full one, 2 MB of every page.
PLOTLY = "plotly-basic.min.js"
# What it draws of ours; none by WebGL, which Chromium lacks without a GPU.
DRAWN = {"scatter", "bar"}
WIDE = 24  # letters of a text that is broken into lines; a phone gives its column a line of its own


def page_html(page: doc.Page) -> str:
    """The page, whole. Raises PlannerError where plotly is missing."""
    charts = [part for part in all_parts(page) if isinstance(part, doc.Chart)]
    keys = [chart.key for chart in charts]
    assert len(keys) == len(set(keys)), "two charts of one key"
    number = count(1).__next__  # of tables, for their anchors
    content = _environment().get_template("content.html.j2").render(page=page, number=number)
    scripts = sorted({chart.script for chart in charts if chart.script})
    drawn = {"charts": packed(_drawings(charts)), "plotly": packed(_asset(PLOTLY))} if keys else {}
    names = ("page", "frame", "tables", *scripts)
    return _environment().get_template("page.html.j2").render(
        page=page, generator=_GENERATOR, content=content, packed=drawn, style=_asset("page.css"),
        first=_asset("first.js"), scripts=[_asset(f"{name}.js") for name in names],
    )  # fmt: skip


def column_kinds(table: doc.Table) -> list[str]:
    """Of each column "number", "wide" (a text of many letters is in it), or neither, ""."""
    return [
        "number" if any(isinstance(cell, doc.Number) for cell in column)
        else "wide" if any(len(read(cell)) > WIDE for cell in column) else ""
        for _, *column in zip(table.headers, *table.rows, strict=True)
    ]  # fmt: skip


def read(cell: doc.Cell) -> str:
    """What a cell reads as."""
    if isinstance(cell, doc.Verdict):
        return f"{cell.icon} {cell.word}"
    return (printable(cell.text) or "-") if isinstance(cell, doc.Number) else printable(cell)


def sorted_by(cell: doc.Number) -> str:
    """What a number sorts by, as an attribute; "" for what is not known, or not finite."""
    return "" if cell.value is None or not math.isfinite(cell.value) else repr(cell.value)


def is_page(start: str) -> bool:
    """Whether a file that begins with `start` is a page of ours: some 1,000 characters tell."""
    return f'<meta name="generator" content="{_GENERATOR}">' in start


def all_parts(page: doc.Page) -> Iterator[doc.Part]:
    """Every part, those within folds too."""
    for group in page.groups:
        for section in group.sections:
            yield from _within(section)


def _within(whole: doc.Section | doc.Folded) -> Iterator[doc.Part]:
    for part in whole.parts:
        yield part
        if isinstance(part, doc.Folded):
            yield from _within(part)


def packed(text: str) -> str:
    """Text compressed by gzip, in base64. The same text gives the same bytes."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _drawings(charts: Sequence[doc.Chart]) -> str:
    """Charts by key, as JSON. The look of a figure is the page's, and no figure brings its own."""
    from plotly.io.json import to_json_plotly

    drawings: dict[str, Any] = {}
    for chart in charts:
        figure = chart.figure.to_dict()
        figure["layout"].pop("template", None)
        kinds = {trace["type"] for trace in figure["data"]}
        assert kinds <= DRAWN, f"{chart.key} needs more of plotly than the page has"
        drawings[chart.key] = {"figure": figure, "script": chart.script, "data": dict(chart.data)}
    text: str = to_json_plotly(drawings, engine="json")
    return text


def _asset(name: str) -> str:
    return (_HERE / "assets" / name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(_HERE / "templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, finalize=_shown,
    )  # fmt: skip
    made.tests["number"] = lambda cell: isinstance(cell, doc.Number)
    made.tests["verdict"] = lambda cell: isinstance(cell, doc.Verdict)
    made.filters["kinds"] = column_kinds
    made.filters["kind"] = lambda part: type(part).__name__.lower()
    made.filters["sorted_by"] = sorted_by
    made.filters["read"] = read
    return made


def _shown(value: Any) -> Any:
    """Control characters as escapes; what is marked as safe (style, scripts) stays as it is."""
    return printable(value) if type(value) is str else value
