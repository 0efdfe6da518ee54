"""Writes the table of docs/troubleshooting.md anew, of what `planner explain` recognises.

python -m tests.explaining.table
"""

import re
from pathlib import Path

from planner.core.failures import SIGNS

PAGE = Path(__file__).parents[2] / "docs/troubleshooting.md"
HEAD = "| what is recognised | what to do first |\n|---|---|\n"
MOST = 120  # characters of a cell (tests/test_pages.py)


# Those of planner.watch's own lines say for themselves what they are.
OF_LOGS = [sign for sign in SIGNS if sign.words != (b"planner.watch: ",)]


def first_of(do: str) -> str:
    """The sentences that fit a cell; where the first alone is too long, its first alternatives, as
    a sentence. `planner explain` says all of it."""
    do = do.replace("|", r"\|")
    if len(do) <= MOST:
        return do
    for ends in (r"(?<=[.?]) (?=[A-Za-z'])", r"; |, or "):
        if found := [end.start() for end in re.finditer(ends, do) if end.start() <= MOST]:
            return do[: found[-1]].rstrip(".") + ("" if do[found[-1] - 1] == "?" else ".")
    raise AssertionError(f"no clause of this fits a cell: {do}")


def table() -> str:
    rows = (f"| {sign.kind} | {first_of(sign.remedies[0].text)} |\n" for sign in OF_LOGS)
    return HEAD + "".join(rows)


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition("| what is recognised")
    after = rest.partition("\n\n")[2]
    PAGE.write_text(f"{before}{table()}\n{after}", encoding="utf-8")
