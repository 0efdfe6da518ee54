"""Folders that somebody else wrote: whatever a file of a run holds, commands that read it end in
their own words, and nothing of it becomes a page's HTML or steers a terminal."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.cli import main
from planner.core.errors import shorten
from tests.cli.test_fuzz import fault_of, hangs
from tests.search.replays import leave_run
from tests.search.tables import invented_table

MARKUP = "</script><script>alert(1)</script>"
# A window's title, a bell, a cleared screen, C1's escape: off a terminal only "\x1b[" is removed.
STEERING = f"\x1b]0;x\x07\x1b[2J\x9b31m\x85\u202e{MARKUP}"
STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
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
)
FILES = ("run/recommendation.json", "run/probes.jsonl")
READERS = (
    ("run/recommendation.json", ["report", "run", "--output", "page.html", "--force"]),
    ("run/recommendation.json", ["emit", "run", "--for", "timm"]),
    ("run/probes.jsonl", ["report", "run", "--output", "page.html", "--force"]),
    ("estimate.json", ["emit", "estimate.json", "--for", "pytorch"]),
    ("advice.json", ["emit", "advice.json", "--for", "transformers"]),
    ("watch.jsonl", ["explain", "watch.jsonl"]),
)
WATCHED = (
    {"kind": "start", "format": 1, "date": "2026-11-29T13:17:43+00:00", "rank": 0, "world_size": 1,
     "device": {"kind": "cpu", "name": "AMD EPYC"}, "versions": {"torch": "2.14.1"}},
    {"kind": "event", "event": "out of memory", "message": "no", "requested_bytes": 9 << 20},
    {"kind": "end", "status": "finished", "step": 3},
)  # fmt: skip


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run, below the current folder."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "whole"
    folder.mkdir()
    leave_run(folder / "run", invented_table()[:40])
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


def texts(data: Any) -> list[tuple[Any, ...]]:
    """Where text stands or could: a string, nothing at all, a new key."""
    found = []
    for place in places(data):
        value = data
        for key in place:
            value = value[key]
        if isinstance(value, dict):
            found.append((*place, STEERING))
        elif place and (value is None or isinstance(value, str)):
            found.append(place)
    return found


def test_no_text_of_a_file_steers_the_terminal_or_becomes_markup(whole: Path, capsys: Any) -> None:
    """Some places of each file, by each command that reads it."""
    os.chdir(whole)
    asked = ("native:swin_tiny", "--gpu", "rtx 3090", "--batch-size", "8", "--json")
    for asking, written in (("estimate", "estimate.json"), ("advise", "advice.json")):
        assert main([asking, *asked]) == 0
        Path(written).write_text(capsys.readouterr().out)
    Path("watch.jsonl").write_text("\n".join(map(json.dumps, WATCHED)))
    chosen = random.Random(0)
    for name, command in READERS:
        text = Path(name).read_text()
        lines = [text] if name.endswith(".json") else text.strip().split("\n")
        number = chosen.randrange(len(lines))
        found = texts(json.loads(lines[number]))
        of_device = [place for place in found if place == ("device", "name")]
        for place in [*of_device, *chosen.sample(found, min(5, len(found)))]:
            changed = json.loads(lines[number])
            holder = changed
            for key in place[:-1]:
                holder = holder[key]
            holder[place[-1]] = STEERING
            anew = [*lines[:number], json.dumps(changed), *lines[number + 1 :]]
            Path(name).write_text("\n".join(anew) + "\n")
            main(list(command))
            said = capsys.readouterr()
            assert not STEERS.search(said.out + said.err), (name, place, command)
            if (page := Path("page.html")).exists():
                assert MARKUP not in page.read_text(), (name, place)
                page.unlink()
        Path(name).write_text(text)


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
