"""A page as one HTML file that contains all that it needs: style, scripts, plotly and data.

Plotly's script and the figures are compressed: browsers have unpacked gzip by themselves since
2023. A security policy in the page forbids it every request.
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
# The kinds of trace in our figures. None needs WebGL, which Chromium lacks without a GPU.
DRAWN = {"scatter", "bar"}
# A text of more characters is broken into lines, and a phone gives its column a line of its own.
WIDE = 24


def page_html(page: doc.Page) -> str:
    """The HTML of a page. Raises PlannerError where plotly is missing."""
    charts = [part for part in all_parts(page) if isinstance(part, doc.Chart)]
    keys = [chart.key for chart in charts]
    assert len(keys) == len(set(keys)), "two charts of one key"
    number = count(1).__next__  # of each table, for its anchor
    content = _environment().get_template("content.html.j2").render(page=page, number=number)
    scripts = sorted({chart.script for chart in charts if chart.script})
    packed = {"charts": pack(_drawings(charts)), "plotly": pack(_asset(PLOTLY))} if charts else {}
    names = ("page", "frame", "tables", *scripts)
    return _environment().get_template("page.html.j2").render(
        page=page, generator=_GENERATOR, content=content, packed=packed,
        style=_asset("page.css"), first=_asset("first.js"),
        scripts=[_asset(f"{name}.js") for name in names],
    )  # fmt: skip


def column_kinds(table: doc.Table) -> list[str]:
    """The kind of each column: "number", "wide" (it has a text of more than WIDE characters), or
    neither, ""."""
    return [
        "number" if any(isinstance(cell, doc.Number) for cell in column)
        else "wide" if any(len(cell_text(cell)) > WIDE for cell in column) else ""
        for _, *column in zip(table.headers, *table.rows, strict=True)
    ]  # fmt: skip


def cell_text(cell: doc.Cell) -> str:
    """The text of a cell."""
    if isinstance(cell, doc.Verdict):
        return f"{cell.icon} {cell.word}"
    return (printable(cell.text) or "-") if isinstance(cell, doc.Number) else printable(cell)


def sort_key(cell: doc.Number) -> str:
    """The value that a cell sorts by, as an HTML attribute; "" if it is unknown or not finite."""
    return "" if cell.value is None or not math.isfinite(cell.value) else repr(cell.value)


def is_page(start: str) -> bool:
    """Whether a file that begins with `start` (some 1,000 characters) is a page of ours."""
    return f'<meta name="generator" content="{_GENERATOR}">' in start


def all_parts(page: doc.Page) -> Iterator[doc.Part]:
    """Every part of a page, also those within folds."""
    for group in page.groups:
        for section in group.sections:
            yield from _nested_parts(section)


def _nested_parts(parent: doc.Section | doc.Folded) -> Iterator[doc.Part]:
    for part in parent.parts:
        yield part
        if isinstance(part, doc.Folded):
            yield from _nested_parts(part)


def pack(text: str) -> str:
    """`text` compressed by gzip, in base64. The same text gives the same result."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _drawings(charts: Sequence[doc.Chart]) -> str:
    """The charts by key, as JSON. No figure keeps a template: the page decides how it looks."""
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

    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, finalize=_escape,
    )  # fmt: skip
    environment.tests["number"] = lambda cell: isinstance(cell, doc.Number)
    environment.tests["verdict"] = lambda cell: isinstance(cell, doc.Verdict)
    environment.filters["kinds"] = column_kinds
    environment.filters["kind"] = lambda part: type(part).__name__.lower()
    environment.filters["sort_key"] = sort_key
    environment.filters["cell_text"] = cell_text
    return environment


def _escape(value: Any) -> Any:
    """Control characters as escapes. Text marked as safe (style, scripts) stays as it is."""
    return printable(value) if type(value) is str else value
