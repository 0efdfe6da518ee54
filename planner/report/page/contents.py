"""What a page is made of. Every text is plain text, whoever wrote it: rendering escapes it."""

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
    """A paragraph; a `kind` sets it apart: "lead", "plain", "note" (smaller), "warning"."""

    text: str
    kind: str = "plain"


@dataclass(frozen=True)
class Facts:
    """Terms and what they are, in order. A `kind` sets them apart: "plain", or "tiles" (the three
    to six figures that are to be seen first)."""

    pairs: Sequence[tuple[str, str]]
    kind: str = "plain"


@dataclass(frozen=True)
class Number:
    """A cell that sorts by `value` and reads as `text`; None is the least, and reads as "-"."""

    value: float | None
    text: str

    def __str__(self) -> str:
        return self.text


VerdictKind = Literal["fits", "likely", "unlikely", "no", "unknown"]
# The icon says the same as the colour, to those who see none, and the word says both.
VERDICTS: Mapping[VerdictKind, tuple[str, str, str]] = {  # and whether it fits, in a cell of text
    "fits": ("✓", "Fits", "yes"),
    "likely": ("≈", "Probably fits", "probably"),
    "unlikely": ("!", "Probably does not fit", "probably not"),
    "no": ("✕", "Does not fit", "no"),
    "unknown": ("?", "Not known whether it fits", ""),
}


@dataclass(frozen=True)
class Verdict:
    """Whether something fits, as a part of the page or as a cell; `text` says more, and is not
    shown in a cell."""

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
    """Rows under headers, which sort when they are clicked. `marked` are the numbers of rows to be
    set apart (the recommended one). `caption` says what it shows. It may have any number of rows:
    a long one is shown a page of rows at a time, and on a terminal its `first` ones."""

    headers: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    marked: Sequence[int] = ()
    first: int = 9

    def filled(self) -> Table:
        """Without the columns of which no row says anything: all read "-"."""
        kept = [n for n in range(len(self.headers)) if {str(row[n]) for row in self.rows} != {"-"}]
        rows = [[row[n] for n in kept] for row in self.rows]
        return replace(self, headers=[self.headers[n] for n in kept], rows=rows)


@dataclass(frozen=True)
class Chart:
    """A plotly figure. `description` is what it shows for who cannot see it. Strings from others
    (names of models, messages) go into a figure through `plotting.plot_text`.

    `table` has its figures, where those of its traces do not say them.

    `script` names a file of `assets/` that makes more of the figure once it is drawn (a timeline
    that resamples when it is zoomed), and `data` what that file needs: plain JSON values.
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
    """A text to take away (a command, a file), with a button that copies it."""

    text: str
    label: str = ""


@dataclass(frozen=True)
class Folded:
    """Parts that are shown when their `summary` is clicked; print shows them where `printed`."""

    summary: str
    parts: Sequence[Part]
    printed: bool = True


Part = Text | Verdict | Facts | Table | Chart | Copyable | Folded


@dataclass(frozen=True)
class Section:
    """A heading and its parts. `key` is its anchor: unique in its group, of letters and hyphens.
    What is there to be copied is not `printed`."""

    key: str
    title: str
    parts: Sequence[Part]
    printed: bool = True


def sections_of(parts: Sequence[Part], title: str = "Answer") -> list[Section]:
    """An answer's parts as a page has them: what stands on a terminal's first screen under `title`,
    and a section for each that is folded there."""
    first = [part for part in parts if not isinstance(part, Folded)]
    folded = [part for part in parts if isinstance(part, Folded)]
    rest = [
        Section(_key(each.summary), f"{each.summary[0].upper()}{each.summary[1:]}", each.parts)
        for each in folded
    ]
    return [Section(_key(title), title, first), *rest]


def _key(title: str) -> str:
    return re.sub(r"[^a-z]+", "-", title.partition("(")[0].lower()).strip("-")


@dataclass(frozen=True)
class Group:
    """The sections of one subject: an estimate, a run. `title` is "" where a page has only one.
    One that is `folded` is shown when its title is clicked, and printed where it is open."""

    key: str
    title: str
    sections: Sequence[Section]
    folded: bool = False


@dataclass(frozen=True)
class Page:
    """A whole page. `lead` is its answer in a sentence or two; `made` says by what and when."""

    title: str
    lead: str
    groups: Sequence[Group]
    made: str = ""
