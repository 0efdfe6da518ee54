"""An answer's parts as text for a terminal, at its width: its first screen, or all of it."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence

from planner.report.page import contents as doc

WIDTH = 100  # characters of a line where there is no terminal
NARROWEST = 60
_LONGEST_WORD = 30  # that is kept whole: a file and its line
_LEAST_COLUMN = 14  # characters, of a text that is broken to make a table narrower


def parts_text(parts: Sequence[doc.Part], detail: bool = False) -> str:
    """Paragraphs in the order of `parts`. What is folded, and the rows of a table beyond its first
    ones, is there only in `detail`; without it the last line says what there is."""
    text = "".join(_paragraphs(parts, detail)).strip("\n")
    folded = [part.summary for part in parts if isinstance(part, doc.Folded)]
    if detail or not folded:
        return text
    return "\n".join([text, wrapped(f"--detail adds: {'; '.join(folded)}.")])


def _paragraphs(parts: Sequence[doc.Part], detail: bool) -> Iterator[str]:
    for part in parts:
        text = _text(part, detail)
        if text:
            yield text + ("\n" if isinstance(part, doc.Verdict) else "\n\n")


def _text(part: doc.Part, detail: bool) -> str:
    match part:
        case doc.Text(text):
            return "\n".join(wrapped(line, _indent(line)) for line in text.split("\n"))
        case doc.Verdict(text=text):
            return wrapped(f"{part.word}: {text[0].lower()}{text[1:]}" if text else part.word)
        case doc.Facts(pairs):
            most = max((len(term) for term, _ in pairs), default=0) + 2
            return "\n".join(wrapped(f"{term:<{most}}{of}", " " * most) for term, of in pairs)
        case doc.Table():
            return _table(part, detail)
        case doc.Copyable(command, label):
            return f"{label}:\n{command_text(command)}" if label else command_text(command)
        case doc.Folded(summary, parts) if detail:
            heading = f"{summary[0].upper()}{summary[1:]}:"
            return "\n".join([heading, "".join(_paragraphs(parts, detail)).rstrip("\n")])
    return ""  # a chart says more on the page


def _indent(line: str) -> str:
    return "  " if line.startswith(("- ", "  ")) else ""


def _table(table: doc.Table, detail: bool) -> str:
    is_whole = detail or len(table.rows) <= table.first + 1  # one more takes no more than to say so
    shown = table.rows if is_whole else table.rows[: table.first]
    if not shown:
        return ""
    numeric = [
        all(isinstance(row[n], doc.Number) for row in table.rows) for n in range(len(table.headers))
    ]
    text = table_text(
        [[_cell(cell) for cell in row] for row in shown],
        table.headers if any(table.headers) else (),
        "".join("r" if one else "l" for one in numeric),
    )
    caption = [wrapped(table.caption)] if table.caption else []
    more = len(table.rows) - len(shown)
    return "\n".join([*caption, text, *([f"and {more} more: --detail"] if more else [])])


def _cell(cell: doc.Cell) -> str:
    return doc.VERDICTS[cell.kind][2] if isinstance(cell, doc.Verdict) else str(cell)


def width() -> int:
    """That of the terminal that standard output is, from NARROWEST to WIDTH; else WIDTH."""
    if sys.stdout is None or not sys.stdout.isatty():
        return WIDTH
    return min(max(shutil.get_terminal_size((WIDTH, 24)).columns, NARROWEST), WIDTH)


def wrapped(text: str, indent: str = "") -> str:
    """`text` in lines of `width()`, those after the first indented. A long word (a path, a model's
    name) stays whole, however long it is."""
    return textwrap.fill(
        text, width(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def fitted(text: str) -> str:
    """`text` with the lines that are wider than the terminal broken between words, as far in as
    they begin; as it is where there is none."""
    if sys.stdout is None or not sys.stdout.isatty():
        return text
    return "\n".join(_fitted(line) if len(line) > width() else line for line in text.split("\n"))


def _fitted(line: str) -> str:
    indent = " " * (len(line) - len(line.lstrip(" -")))
    return wrapped(line, indent or ("  " if "  " in line else ""))  # the rest of a row of a table


def command_text(command: str, indent: str = "  ") -> str:
    """A command to be pasted: on a terminal that is narrower, before options, with a backslash."""
    if len(indent) + len(command) <= width() or not sys.stdout.isatty():
        return f"{indent}{command}"
    lines, room = [""], width() - 2 * len(indent) - 2
    for part in command.replace(" | ", " |\0").replace(" --", "\0--").split("\0"):
        if lines[-1] and len(lines[-1]) + 1 + len(part) > room:
            lines.append(part)
        else:
            lines[-1] = f"{lines[-1]} {part}".strip()
    return f" \\\n{2 * indent}".join([f"{indent}{lines[0]}", *lines[1:]])


def table_text(
    rows: Sequence[Sequence[str | None]], headers: Sequence[str] = (), align: str = ""
) -> str:
    """`rows` of one length, with a line under their headers if they have any; None reads as "-".
    On a terminal that is narrower, its widest texts are broken into lines within their columns.

    `align` has a letter for each column: "l" for left, "r" for right; columns after its last are as
    that one. All are to the left by default.
    """
    # Imported here, since `planner estimate --json` has no use for it and is timed.
    from tabulate import tabulate

    if not rows:
        return ""
    letters = (align or "l").ljust(len(rows[0]), align[-1:] or "l")[: len(rows[0])]
    cells = [["-" if cell is None else cell for cell in row] for row in rows]
    widths = _widths([headers, *cells] if headers else cells)
    texts = [number for number, letter in enumerate(letters) if letter == "l"]
    for long in sorted(texts, key=lambda number: -widths[number]) if sys.stdout.isatty() else ():
        if (over := sum(widths) + 2 * (len(widths) - 1) - width()) > 0:
            room = max(widths[long] - over, _LEAST_COLUMN)
            words = (word for row in cells for word in row[long].split())
            room = max(room, min(max(map(len, words), default=0), _LONGEST_WORD))
            breaking = textwrap.TextWrapper(room, break_on_hyphens=False)
            cells = [[*row[:long], breaking.fill(row[long]), *row[long + 1 :]] for row in cells]
            widths = _widths([headers, *cells] if headers else cells)
    if headers:  # tabulate's own would be two characters wider than what they say
        cells = [list(headers), ["-" * width for width in widths], *cells]
    sides = [{"l": "left", "r": "right"}[letter] for letter in letters]
    return tabulate(cells, tablefmt="plain", colalign=sides, disable_numparse=True)


def _widths(cells: Sequence[Sequence[str]]) -> list[int]:
    """Of each column its longest line."""
    return [max(len(line) for cell in column for line in cell.split("\n"))
            for column in zip(*cells, strict=True)]  # fmt: skip
