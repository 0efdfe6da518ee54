"""An answer's parts as text: those of a terminal's first screen, or all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.report.page.contents import (
    Cell,
    Copyable,
    Facts,
    Folded,
    Number,
    Part,
    Table,
    Text,
    Verdict,
    VerdictKind,
)
from planner.report.terminal import command_text, table_text, wrapped

FITS: dict[VerdictKind, str] = {
    "fits": "yes", "likely": "probably", "unlikely": "probably not", "no": "no", "unknown": "",
}  # fmt: skip


def parts_text(parts: Sequence[Part], detail: bool = False) -> str:
    """Paragraphs in the order of `parts`. What is folded, and the rows of a table beyond its first
    ones, is there only in `detail`; without it the last line says what there is."""
    text = "".join(_paragraphs(parts, detail)).strip("\n")
    folded = [part.summary for part in parts if isinstance(part, Folded)]
    if detail or not folded:
        return text
    return "\n".join([text, wrapped(f"--detail adds: {'; '.join(folded)}.")])


def _paragraphs(parts: Sequence[Part], detail: bool) -> Iterator[str]:
    for part in parts:
        text = _text(part, detail)
        if text:
            yield text + ("\n" if isinstance(part, Verdict) else "\n\n")


def _text(part: Part, detail: bool) -> str:
    match part:
        case Text(text):
            return "\n".join(wrapped(line, _indent(line)) for line in text.split("\n"))
        case Verdict(text=text):
            return wrapped(f"{part.word}: {text[0].lower()}{text[1:]}" if text else part.word)
        case Facts(pairs):
            return table_text(list(pairs))
        case Table():
            return _table(part, detail)
        case Copyable(command, label):
            return f"{label}:\n{command_text(command)}" if label else command_text(command)
        case Folded(summary, parts) if detail:
            heading = f"{summary[0].upper()}{summary[1:]}:"
            return "\n".join([heading, "".join(_paragraphs(parts, detail)).rstrip("\n")])
    return ""  # a chart says more on the page


def _indent(line: str) -> str:
    return "  " if line.startswith(("- ", "  ")) else ""


def _table(table: Table, detail: bool) -> str:
    is_whole = detail or len(table.rows) <= table.first + 1  # one more takes no more than to say so
    shown = table.rows if is_whole else table.rows[: table.first]
    if not shown:
        return ""
    numeric = [
        all(isinstance(row[n], Number) for row in table.rows) for n in range(len(table.headers))
    ]
    text = table_text(
        [[_cell(cell) for cell in row] for row in shown],
        table.headers if any(table.headers) else (),
        "".join("r" if one else "l" for one in numeric),
    )
    caption = [wrapped(table.caption)] if table.caption else []
    more = len(table.rows) - len(shown)
    return "\n".join([*caption, text, *([f"and {more} more: --detail"] if more else [])])


def _cell(cell: Cell) -> str:
    return FITS[cell.kind] if isinstance(cell, Verdict) else str(cell)
