"""Writes the table of docs/troubleshooting.md anew, of what `planner explain` recognises.

python -m tests.explaining.table
"""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import shorten

from planner.core.failures import SIGNS

PAGE = Path(__file__).parents[2] / "docs/troubleshooting.md"
HEAD = "| what is recognised | what to do first |\n|---|---|\n"
MOST = 100  # characters of a cell


def first_of(do: str) -> str:
    """What fits a cell, up to the end of a clause; `planner explain` says all of it."""
    do = do.replace("|", r"\|")
    if len(do) <= MOST:
        return do
    for ends in (";.", ":", ","):
        if clauses := re.match(rf"(.{{40,{MOST - 3}}})[{ends}] ", do):
            return f"{clauses[1].rstrip('…')} …"
    return shorten(do, MOST, placeholder=" …")


def table() -> str:
    rows = (f"| {sign.kind} | {first_of(sign.todo[0].do)} |\n" for sign in SIGNS)
    return HEAD + "".join(rows)


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition("| what is recognised")
    after = rest.partition("\n\n")[2]
    PAGE.write_text(f"{before}{table()}\n{after}", encoding="utf-8")
