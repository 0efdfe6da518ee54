"""Comments of emitted files: what a file says of itself, in lines that can be nothing but comments.

Names, dates and versions come from `recommendation.json`, which others may have written: each is
brought onto one line of printable characters before it stands behind a `#`.
"""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import wrap

WRITTEN_BY = "Written by 'planner emit'"
FIRST_LINES = f"# {WRITTEN_BY}, which replaces files that begin with this line.\n#\n"
"""Of every file, ours to the letter: Python looks for a file's encoding in the first two lines."""
_WIDTH = 98
_LONGEST = 300


def one_line(text: str, longest: int = _LONGEST) -> str:
    """`text` on one line: what does not print (newlines, NUL, surrogates …) is escaped."""
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii")
        for c in text[: longest + 1]
    )
    return shown if len(text) <= longest else f"{shown[:longest]}..."


def comment(heading: Iterable[str], run: str, more: Iterable[str], notes: Iterable[str]) -> str:
    """The `#` lines that say where a setting comes from, how to run it, what to know of it."""
    lines = [line for text in heading for line in _paragraph(text, "")]
    lines += ["", f"Run: {one_line(run, 2000)}", *(one_line(line) for line in more)]
    noted = [line for note in notes for line in _paragraph(f"- {note}", "  ")]
    lines += ["", "Note:", *noted] if noted else []
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def _paragraph(text: str, indent: str) -> list[str]:
    return wrap(one_line(text, 1000), _WIDTH, subsequent_indent=indent, break_on_hyphens=False) or [
        ""
    ]


def is_ours(text: str) -> bool:
    """Whether a file that begins with `text` was written by `planner emit`."""
    return WRITTEN_BY in text[:200]
