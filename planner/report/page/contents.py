"""The parts that answers and pages are made of: texts, facts, tables, charts, sections.

Every text is plain text, whoever wrote it: rendering escapes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from planner.core.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


@dataclass(frozen=True)
class Text:
    """A paragraph. Its `kind` sets its look: "lead", "plain", "note" (smaller), "warning"."""

    text: str
    kind: str = "plain"


@dataclass(frozen=True)
class Facts:
    """Terms with their values, in order. The `kind` decides how they look: "plain", or "tiles" (the
    three to six figures to see first)."""

    pairs: Sequence[tuple[str, str]]
    kind: str = "plain"


@dataclass(frozen=True)
class Number:
    """A cell that sorts by `value` and reads as `text`. None sorts first."""

    value: float | None
    text: str

    def __str__(self) -> str:
        return self.text


VerdictKind = Literal["fits", "likely", "unlikely", "no", "unknown"]
# The icon, the words, and the text of a terminal's cell. The icon says what the colour does, for
# those who see no colour.
VERDICTS: Mapping[VerdictKind, tuple[str, str, str]] = {
    "fits": ("✓", "Fits", "yes"),
    "likely": ("≈", "Probably fits", "probably"),
    "unlikely": ("!", "Probably does not fit", "probably not"),
    "no": ("✕", "Does not fit", "no"),
    "unknown": ("?", "Not known whether it fits", ""),
}


@dataclass(frozen=True)
class Verdict:
    """Whether something fits, as a part of the page or as a cell. A cell does not show `text`,
    which says more."""

    kind: VerdictKind
    text: str = ""

    @property
    def icon(self) -> str:
        return VERDICTS[self.kind][0]

    @property
    def word(self) -> str:
        return VERDICTS[self.kind][1]


Cell = str | Number | Verdict


def bytes_cell(num_bytes: int | None) -> Number:
    return Number(num_bytes, "-" if num_bytes is None else format_bytes(num_bytes))


def seconds_cell(seconds: float | None) -> Number:
    return Number(seconds, "-" if seconds is None else format_seconds(seconds))


def rate_cell(rate: float | None) -> Number:
    return Number(rate, format_rate(rate))


def count_cell(number: int | None) -> Number:
    return Number(number, "-" if number is None else f"{number:,}")


def share_cell(share: float, whole: float = 1.0) -> Number:
    return Number(share, f"{share / (whole or 1.0):.1%}")


@dataclass(frozen=True)
class Table:
    """Rows under headers; a click on a header sorts them. `marked` are the indices of the rows to
    highlight (the recommended one), and `caption` says what the table shows. A page shows a long
    table a part at a time, and a terminal its `first` rows."""

    headers: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    marked: Sequence[int] = ()
    first: int = 9

    def compact(self) -> Table:
        """The table without its empty columns: those where every row reads "-"."""
        used = [n for n in range(len(self.headers)) if {str(row[n]) for row in self.rows} != {"-"}]
        rows = [[row[n] for n in used] for row in self.rows]
        return replace(self, headers=[self.headers[n] for n in used], rows=rows)


@dataclass(frozen=True)
class Chart:
    """A plotly figure. `description` says what it shows, also to those who cannot see it. Strings
    from others (names of models, messages) go into a figure through `plotting.plot_text`.

    `table` has the figures of the chart, where its traces do not have them.

    `script` names a file of `assets/` that extends the figure once it is drawn (a timeline that
    resamples when it is zoomed), and `data` holds the plain JSON values that this file needs.
    """

    key: str
    figure: Figure
    description: str
    height_px: int = 420
    script: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    table: Table | None = None


@dataclass(frozen=True)
class Copyable:
    """A text to copy (a command, a file), with a button that copies it."""

    text: str
    label: str = ""


@dataclass(frozen=True)
class Folded:
    """Parts that a click on their `summary` shows. On paper they are shown if `printed`."""

    summary: str
    parts: Sequence[Part]
    printed: bool = True


Part = Text | Verdict | Facts | Table | Chart | Copyable | Folded


@dataclass(frozen=True)
class Section:
    """A heading and its parts. `key` is its anchor: unique in its group, of letters and hyphens.
    On paper a section is shown if `printed`."""

    key: str
    title: str
    parts: Sequence[Part]
    printed: bool = True


def make_sections(parts: Sequence[Part], title: str = "Answer") -> list[Section]:
    """An answer's parts as sections of a page: the first screen of a terminal under `title`, and a
    section for each part that is folded there."""
    sections = [Section(_anchor(title), title, [p for p in parts if not isinstance(p, Folded)])]
    for part in parts:
        if isinstance(part, Folded):
            heading = f"{part.summary[0].upper()}{part.summary[1:]}"
            sections.append(Section(_anchor(part.summary), heading, part.parts))
    return sections


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z]+", "-", title.partition("(")[0].lower()).strip("-")


@dataclass(frozen=True)
class Group:
    """The sections of one subject: an estimate, a run. `title` is "" if the page has one subject.
    A click on its title shows a group that is `folded`; on paper it is shown if it is open."""

    key: str
    title: str
    sections: Sequence[Section]
    folded: bool = False


@dataclass(frozen=True)
class Page:
    """A whole page. Its `footer` says what made the page and when."""

    title: str
    groups: Sequence[Group]
    footer: str = ""
