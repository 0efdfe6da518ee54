"""docs/guides.md: every technique has one row, its status is counted, and its files exist."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "guides.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if re.match(r"\| \d", line)
]


def test_every_technique_has_one_row() -> None:
    assert [int(row[0]) for row in ROWS] == list(range(1, 84))
    assert {len(row) for row in ROWS} == {5}


def test_the_statuses_are_counted() -> None:
    count = Counter(row[2] for row in ROWS)
    assert set(count) <= {"works", "partly", "absent"}
    said = f"{count['works']} work, {count['partly']} partly, {count['absent']} are absent."
    assert said in " ".join(TEXT.split())


def test_what_works_says_where() -> None:
    assert [row[0] for row in ROWS if row[2] == "works" and not row[3]] == []


def test_the_files_exist() -> None:
    named = set(re.findall(r"`((?:planner|search|tests)/[\w/.]+?)(?::\w+)?`", TEXT))
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
