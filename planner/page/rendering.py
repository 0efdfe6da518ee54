"""A page as one HTML file that needs nothing else: style, scripts, plotly and data lie within.

Plotly's script and the figures are compressed: plain, plotly alone is as large as a page may be.
Browsers have unpacked gzip by themselves since 2023. A security policy in the page keeps it from
asking anybody for anything.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import PlannerError, printable
from planner.page.contents import Cell, Chart, Folded, Number, Page, Part, Section, Tabs

if TYPE_CHECKING:
    from jinja2 import Environment

_HERE = Path(__file__).parent


def page_html(page: Page) -> str:
    """The page, whole. Raises PlannerError where jinja2 or plotly is missing."""
    charts = [part for part in all_parts(page) if isinstance(part, Chart)]
    keys = [chart.key for chart in charts]
    assert len(keys) == len(set(keys)), "two charts of one key"
    scripts = sorted({chart.script for chart in charts if chart.script})
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            page=page,
            style=_asset("page.css"),
            scripts=[_asset("page.js"), *(_asset(f"{name}.js") for name in scripts)],
            plotly=_plotly() if charts else "",
            data=packed(json.dumps({chart.key: _drawing(chart) for chart in charts})),
        )
    )


def all_parts(page: Page) -> Iterator[Part]:
    """Every part, those within tabs and folds too."""
    for group in page.groups:
        for section in group.sections:
            yield from _within(section)


def _within(whole: Section | Folded) -> Iterator[Part]:
    for part in whole.parts:
        yield part
        if isinstance(part, Folded):
            yield from _within(part)
        elif isinstance(part, Tabs):
            for _, parts in part.tabs:
                yield from _within(Folded("", parts))


def packed(text: str) -> str:
    """Text compressed by gzip, in base64. The same text gives the same bytes."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _drawing(chart: Chart) -> dict[str, Any]:
    return {
        "figure": json.loads(chart.figure.to_json()),
        "script": chart.script,
        "data": dict(chart.data),
    }


@cache
def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise PlannerError(
            "a report needs plotly, which is not installed.", "pip install plotly"
        ) from None
    return packed(get_plotlyjs())


def _asset(name: str) -> str:
    return (_HERE / "assets" / name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError:
        raise PlannerError(
            "a report needs jinja2, which is not installed.", "pip install jinja2"
        ) from None
    made = Environment(
        loader=FileSystemLoader(_HERE / "templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, finalize=_shown,
    )  # fmt: skip
    made.tests["number"] = lambda cell: isinstance(cell, Number)
    made.filters["kind"] = lambda part: type(part).__name__.lower()
    made.filters["sorted_by"] = sorted_by
    return made


def _shown(value: Any) -> Any:
    """Control characters as escapes; what is marked as safe (style, scripts) stays as it is."""
    return printable(value) if type(value) is str else value


def sorted_by(cell: Cell) -> str:
    """What a cell sorts by, as an attribute; "" for text and for a number that is not known."""
    return repr(cell.value) if isinstance(cell, Number) and cell.value is not None else ""


def numeric_columns(rows: Sequence[Sequence[Cell]]) -> list[bool]:
    """Which columns hold numbers."""
    return [any(isinstance(cell, Number) for cell in column) for column in zip(*rows, strict=True)]
