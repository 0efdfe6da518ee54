"""Folders that somebody else wrote: whatever a file of a run holds, commands that read it end in
their own words, and nothing of it becomes a page's HTML."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.core.errors import shorten
from search.loop.study.records import format_record
from search.tuning.tune import tune
from tests.cli.test_fuzz import fault_of, hangs
from tests.search.tables import invented_table

MARKUP = "</script><script>alert(1)</script>"
# As JSON: Python's own writer has no number of a thousand digits, and no twin of a key.
HOSTILE = (
    "null", "true", "0", "-1", "1e400", "-1e400", "NaN", "Infinity", "1" + "0" * 400, "9" * 5000,
    "-" + "9" * 25, "1e-320", "0.5", '""', '"x"', '"1"', "[]", "{}", "[[]]", "[null]", '{"a": 1}',
    json.dumps(MARKUP), json.dumps("x" * 100_000), '"\\ud800"', '"\\u0000"', '"\\u001b[31m"',
    json.dumps("9" * 400), "[" * 200 + "]" * 200, '"bf16"', '"measured"', '"2026-99-99T99:99:99"',
)  # fmt: skip
COMMANDS = (
    ["report", "run", "--output", "page.html", "--force"],
    ["report", "run/probes.jsonl", "--output", "page.html", "--force"],
    ["emit", "run", "--for", "timm"],
    ["emit", "run", "--for", "pytorch"],
    ["tune", "--replay", "run/probes.jsonl", "--output", "again", "--budget", "1s", "--quiet"],
)
FILES = ("run/recommendation.json", "run/probes.jsonl")


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run, below the current folder."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "whole"
    folder.mkdir()
    (folder / "table.jsonl").write_bytes(b"".join(map(format_record, invented_table()[:40])))
    tune(None, replay=folder / "table.jsonl", output=folder / "run", estimator=None)
    return folder


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the values of some JSON are."""
    yield path
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from places(value, (*path, key))


def mutant(text: str, chosen: random.Random) -> str:
    """A line of JSON with a value replaced or removed, or its text cut or flipped."""
    how = chosen.random()
    if how < 0.1:
        return text[: chosen.randrange(len(text))]
    if how < 0.2:
        at = chosen.randrange(len(text))
        return text[:at] + chr(chosen.randrange(1, 255)) + text[at + 1 :]
    data = json.loads(text)
    *above, last = chosen.choice([p for p in places(data) if p])
    holder = data
    for key in above:
        holder = holder[key]
    if how < 0.3:
        del holder[last]
        return json.dumps(data)
    holder[last] = "HERE"
    return json.dumps(data).replace('"HERE"', chosen.choice(HOSTILE))


def spoil(folder: Path, chosen: random.Random) -> str:
    """Changes one file of `folder`; says how."""
    name = chosen.choice(FILES)
    lines = (folder / name).read_text().strip().split("\n")
    if name.endswith(".json"):
        lines = ["\n".join(lines)]
    number = chosen.randrange(len(lines))
    lines[number] = mutant(lines[number], chosen)
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogatepass")
    return f"line {number + 1} of {name}: {shorten(lines[number])}"


def read_mutants(whole: Path, seed: int, count: int, capsys: Any) -> Counter[int]:
    """How often each exit status came, of `count` mutants, each read by one command."""
    chosen = random.Random(seed)
    statuses: Counter[int] = Counter()
    faults = []
    os.chdir(whole.parent)
    before = signal.signal(signal.SIGALRM, hangs)
    try:
        for number in range(count):
            folder = whole.parent / str(number)
            shutil.copytree(whole, folder)
            said = spoil(folder, chosen)
            os.chdir(folder)
            command = chosen.choice(COMMANDS)
            fault = fault_of(list(command), capsys, statuses)
            if not fault and (page := Path("page.html")).exists() and MARKUP in page.read_text():
                fault = "its markup is on the page"
            faults += [f"mutant {number}, {said}: {' '.join(command)}: {fault}"] if fault else []
            os.chdir(whole.parent)
            shutil.rmtree(folder)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not faults, "\n".join([f"{len(faults)} faults", *faults[:50]])
    return statuses


def test_no_file_of_a_run_ends_a_command_in_a_traceback(whole: Path, capsys: Any) -> None:
    statuses = read_mutants(whole, 0, 20, capsys)
    assert statuses[0]
    assert statuses[1] + statuses[2]
