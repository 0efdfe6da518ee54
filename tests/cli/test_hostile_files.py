"""Folders that somebody else wrote: whatever a file of a run holds, commands that read it end in
their own words, and nothing of it becomes a page's HTML or steers a terminal."""

from __future__ import annotations

import json
import random
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.cli import main
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
READERS = (
    ("run/recommendation.json", ["report", "run", "--output", "page.html", "--force"]),
    ("run/recommendation.json", ["emit", "run", "--for", "timm"]),
    ("run/recommendation.json", ["emit", "run", "--for", "pytorch"]),
    ("run/probes.jsonl", ["report", "run", "--output", "page.html", "--force"]),
    ("estimate.json", ["emit", "estimate.json", "--for", "pytorch"]),
    ("advice.json", ["emit", "advice.json", "--for", "transformers"]),
)


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the values of some JSON are."""
    yield path
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from places(value, (*path, key))


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


def changed(text: str, place: tuple[Any, ...], value: str) -> str:
    """Some JSON with another value, which is JSON too, at a place."""
    data = json.loads(text)
    *above, last = place
    holder = data
    for key in above:
        holder = holder[key]
    holder[last] = "HERE"
    return json.dumps(data).replace('"HERE"', value)


def mutants(text: str, chosen: random.Random) -> Iterator[str]:
    """A line of JSON with text that steers, with a hostile value, or cut, or flipped."""
    data = json.loads(text)
    found = texts(data)
    of_device = [place for place in found if place == ("device", "name")]
    for place in [*of_device, *chosen.sample(found, min(5, len(found)))]:
        yield changed(text, place, json.dumps(STEERING))
    for place in chosen.sample([place for place in places(data) if place], 3):
        yield changed(text, place, chosen.choice(HOSTILE))
    at = chosen.randrange(len(text))
    yield text[:at]
    yield text[:at] + chr(chosen.randrange(1, 255)) + text[at + 1 :]


def test_no_file_steers_the_terminal_becomes_markup_or_ends_in_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Some places of each file, by each command that reads it."""
    monkeypatch.chdir(tmp_path)
    leave_run(tmp_path / "run", invented_table()[:40])
    asked = ("native:swin_tiny", "--gpu", "rtx 3090", "--batch-size", "8", "--json")
    for asking, written in (("estimate", "estimate.json"), ("advise", "advice.json")):
        assert main([asking, *asked]) == 0
        Path(written).write_text(capsys.readouterr().out)
    chosen, statuses = random.Random(0), Counter[int]()
    signal.signal(signal.SIGALRM, hangs)
    for name, command in READERS:
        text = Path(name).read_text()
        lines = [text] if name.endswith(".json") else text.strip().split("\n")
        number = chosen.randrange(len(lines))
        for mutant in mutants(lines[number], chosen):
            anew = "\n".join([*lines[:number], mutant, *lines[number + 1 :]])
            Path(name).write_text(anew + "\n", encoding="utf-8", errors="surrogatepass")
            said, fault = fault_of(list(command), capsys, statuses)
            assert not fault, (name, mutant, command)
            assert not STEERS.search(said), (name, mutant, command)
            if (page := Path("page.html")).exists():
                assert MARKUP not in page.read_text(), (name, mutant)
                page.unlink()
        Path(name).write_text(text)
    assert statuses[0]
    assert statuses[1] + statuses[2]
