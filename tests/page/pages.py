"""A page with every kind of part, of which others wrote every text."""

from collections.abc import Sequence

from plotly import graph_objects

from planner.report.page.contents import (
    Chart,
    Copyable,
    Facts,
    Folded,
    Group,
    Number,
    Page,
    Part,
    Section,
    Table,
    Text,
    Verdict,
)
from planner.report.page.plotting import new_figure, plot_text

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "</script><script>alert(3)</script>",
    "' onmouseover='alert(4)",
    "{{7*7}}{% raw %}",
    "<!--<script>",
    "javascript:alert(5)",
    "a\x00b\x1b[31mred\x07\r\x85",
    "\u202edrowssap\u202c\u2066",
    "lone \ud83d surrogate",
    "&lt;b&gt;&amp;",
    "W" * 800,
)


def hostile(texts: Sequence[str] = HOSTILE) -> Page:
    """A page of which others wrote every text."""
    everything = "\n".join(texts)
    long = Table(texts, [[*texts[:-1], Number(float(n), everything)] for n in range(500)])
    sections = [Section(f"s{n}", text, parts_of(text, f"g1-k{n}")) for n, text in enumerate(texts)]
    sections.append(Section("all", everything, [long]))
    return Page(everything, [Group("g1", everything, sections)], everything)


def parts_of(text: str, key: str) -> list[Part]:
    """Each kind of part with `text` wherever it has a text."""
    rows = [[text, Number(1.0, text)], [text, Number(None, text)]]
    label = plot_text(text)
    trace = graph_objects.Bar(x=[label], y=[1], name=label, hovertext=[label])
    figure = new_figure([trace], title={"text": label}, xaxis={"title": {"text": label}})
    return [
        Text(text),
        Text(text, "lead"),
        Text(text, "note"),
        Text(text, "warning"),
        Facts([(text, text)]),
        Facts([(text, text)], "tiles"),
        Table([text, text], rows, text, [0]),
        Copyable(text, text),
        Folded(text, [Text(text)]),
        Verdict("likely", text),
        Chart(f"{key}-chart", figure, text, data={"name": text}),
    ]
