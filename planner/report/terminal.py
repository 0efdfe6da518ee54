"""Text for a terminal: lines of its width, and tables that fit it."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

WIDTH = 100  # characters of a line where there is no terminal
NARROWEST = 60


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
    On a terminal that is narrower, each row is a block of lines, a cell in each.

    `align` has a letter for each column: "l" for left, "r" for right, "d" for the decimal point;
    columns after its last are as that one. All are to the left by default.
    """
    # Imported here, since `planner estimate --json` has no use for it and is timed.
    from tabulate import tabulate

    if not rows:
        return ""
    letters = (align or "l").ljust(len(rows[0]), align[-1:] or "l")[: len(rows[0])]
    sides = [{"l": "left", "r": "right", "d": "decimal"}[letter] for letter in letters]
    text = tabulate(
        rows, headers, "simple" if headers else "plain", disable_numparse=True, missingval="-",
        colalign=sides,
    )  # fmt: skip
    if not headers or not sys.stdout.isatty() or max(map(len, text.splitlines())) <= width():
        return text
    return _stacked(rows, [header.replace("-\n", "").replace("\n", " ") for header in headers])


def _stacked(rows: Sequence[Sequence[str | None]], headers: Sequence[str]) -> str:
    named = max(map(len, headers)) + 2
    blocks = [
        "\n".join(
            textwrap.fill(
                f"{header.ljust(named)}{'-' if cell is None else cell}".rstrip(), width(),
                subsequent_indent=" " * named, break_long_words=False, break_on_hyphens=False,
            )
            for header, cell in zip(headers, row, strict=True)
        )
        for row in rows
    ]  # fmt: skip
    return "\n\n".join(blocks)
