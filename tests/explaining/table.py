"""Writes the table of docs/troubleshooting.md anew, of what `planner explain` recognises.

python -m tests.explaining.table
"""

from __future__ import annotations

from pathlib import Path

from planner.core.failures import SIGNS

PAGE = Path(__file__).parents[2] / "docs/troubleshooting.md"
HEAD = "| what is recognised | what it means | of torch |\n|---|---|---|\n"


def table() -> str:
    rows = (f"| {sign.kind} | {sign.means} | {sign.torch or 'any'} |\n" for sign in SIGNS)
    return HEAD + "".join(rows)


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition("| what is recognised")
    after = rest.partition("\n\n")[2]
    PAGE.write_text(f"{before}{table()}\n{after}", encoding="utf-8")
