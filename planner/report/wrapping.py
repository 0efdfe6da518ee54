"""Text in lines of one width."""

from __future__ import annotations

import textwrap

WIDTH = 100  # characters of a line


def wrapped(text: str, indent: str = "") -> str:
    """`text` in lines of `WIDTH`, those after the first indented. A long word (a path, a model's
    name) stays whole, however long it is."""
    return textwrap.fill(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
