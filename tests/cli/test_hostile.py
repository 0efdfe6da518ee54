"""Command lines that nobody would type, and files that somebody else wrote: no command ends in a
traceback, hangs, or has another exit status than those that are documented; each error has a way
out; and nothing of a file becomes a page's HTML or steers a terminal."""

import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import click
import pytest

from planner.cli import COMMANDS, cli, main
from planner.core.errors import PlannerError, _vocabulary, shorten
from planner.estimation.arguments import ALL_FIELDS
from tests.cli.test_help import command_context
from tests.search.replays import leave_run
from tests.search.tables import invented_table

STATUSES = {0, 1, 2, 130}
HANGS_SECONDS = 120  # a line of these takes some hundredths of a second on an idle machine
# By itself each of these is wrong nearly everywhere.
TYPED = (
    "", " ", ",", ",,", "-", "--", "=", ":", "0", "-1", "1.5", "nan", "inf", "-inf", "1e400",
    "1e-400", "9" * 5000, "99999999999999999999", "0x10", "1_000", "１２", "²", "٣", "½", "true",
    "None", "null", "[]", "{}", "\udcff", "\x1b[31m", "\u202e", "é" * 300, "x" * 5000, "a\nb", "%s",
    "{0}", "$HOME", "*", "~", "..", "/", "/dev/null", "/dev/full", "/dev/stdin", "sqlite:///",
    "sqlite:////nowhere/x.db", "nonsense://x", "1,2,3", "1,,2", "stages:0,9", "blocks:0", "9GiB",
    "-9GiB", "1e9TB", "5%", "500%", "-5%", "0s", "1h-1m", "all", "auto", "cpu", "cuda:99", "cuda:",
    "native:", ":swin_tiny", "os:system", "tests.cli:nothing", "timm:no_such_model",
)  # fmt: skip
# Beside what an option completes: a size, a duration, a share, a number, and what allocators read.
SOUND = ("native:swin_tiny", "24GiB", "1MiB", "1s", "5%", "1", "2", "8,64", "64",
         "expandable_segments:True")  # fmt: skip


def nothing_starts(*_: object, **__: object) -> NoReturn:
    raise PlannerError("no process is started, and nothing is timed, in this test.", "Run it.")


start = subprocess.Popen.__init__


def no_python_starts(self: Any, arguments: Any, *more: Any, **named: Any) -> None:
    """Libraries ask the system's own programs."""
    if sys.executable in arguments:
        nothing_starts()
    start(self, arguments, *more, **named)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Names in the current folder: of what is no file, or holds nothing of ours."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLANNER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(subprocess.Popen, "__init__", no_python_starts)
    monkeypatch.setattr(os, "fork", nothing_starts)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setattr("search.loader._measure", nothing_starts)
    (tmp_path / "folder").mkdir()
    Path("loop").symlink_to("loop")
    Path("dangling.json").symlink_to("nowhere")
    contents = {
        "empty.json": b"", "empty.yaml": b"", "list.json": b"[]", "text.log": b"Killed\n",
        "object.json": b"{}", "nan.json": b'{"embed_dim": NaN}', "bytes.json": bytes(range(256)),
        "deep.json": b"[" * 5000, "records.jsonl": b'{"format": 1}\n', "study.db": b"SQLite",
        "recommendation.json": b'{"format": 1}', "data.json": b"null", "pickle.pt": b"\x80\x04N.",
        "data.tar": b"\0" * 1024, "table.parquet": b"PAR1", "snapshot.pickle": b"\x80\x04}.",
        "swin.yaml": b"embed_dim: 48\n", "page.html": b"mine", "machine.json": b'{"gpus": 3}',
    }  # fmt: skip
    for name, content in contents.items():
        Path(name).write_bytes(content)
    return ("folder", "loop", "dangling.json", *contents)


class Lines:
    """Command lines of a seed."""

    def __init__(self, seed: int, files: tuple[str, ...]) -> None:
        self.random = random.Random(seed)
        self.files = files
        self.words = (*ALL_FIELDS, *_vocabulary(), "", "no such", "é")

    def line(self) -> list[str]:
        name = self.random.choice(list(COMMANDS))
        self.context = context = command_context(name)
        line = [name]
        wanted = self.random.choice((0.05, 0.1, 0.3))
        for parameter in context.command.params:
            if isinstance(parameter, click.Argument):
                line += [self.value(parameter) for _ in range(self.random.choice((0, 1, 1, 1, 2)))]
            elif (
                parameter.name not in ("recorded", "fresh") and self.random.random() < wanted
            ):  # takes a minute
                line.append(self.random.choice(parameter.opts))
                if not getattr(parameter, "is_flag", False):
                    line += [self.value(parameter) for _ in range(parameter.nargs)]
        if self.random.random() < 0.05:
            word = self.random.choice(self.words)
            line.append(f"--{word.replace('_', '-')}")
        return line

    def value(self, parameter: click.Parameter) -> str:
        name = parameter.name or ""
        if name in ("fields", "changes") and self.random.random() < 0.9:
            return f"{self.random.choice(self.words)}={self.any()}"
        if self.random.random() < 0.6:
            completed = [item.value for item in parameter.shell_complete(self.context, "")]
            return self.random.choice(completed or SOUND)
        return self.any()

    def any(self) -> str:
        return self.random.choice(self.random.choice((TYPED, self.files)))


class HangsError(BaseException):
    """No Exception: nothing may take it for one of its own."""


def hangs(*_: object) -> NoReturn:
    raise HangsError


def fault_of(line: list[str], capsys: Any, statuses: Counter[int]) -> tuple[str, str]:
    """(what was said, what is wrong with how a line ended or "")."""
    signal.alarm(HANGS_SECONDS)
    try:
        status = main(line)
    except (Exception, SystemExit, HangsError) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return "", f"{type(error).__name__}: {error}"[:200] + f" ({where.filename}:{where.lineno})"
    finally:
        signal.alarm(0)
        captured = capsys.readouterr()
    statuses[status] += 1
    said = captured.out + captured.err
    if status not in STATUSES:
        return said, f"exit status {status}"
    if "Traceback" in captured.err:
        return said, captured.err[-300:]
    if captured.err.startswith("Error: ") and captured.err.count("\n") == 1:
        return said, f"no way out of {captured.err}"
    return said, "" if status == 0 or said.strip() else f"{status} without a word"


def test_no_line_ends_in_a_traceback(files: tuple[str, ...], capsys: Any) -> None:
    lines, statuses, seen = Lines(0, files), Counter[int](), set[str]()
    before = signal.signal(signal.SIGALRM, hangs)
    try:
        for line in (lines.line() for _ in range(250)):
            seen.add(line[0])
            fault = fault_of(line, capsys, statuses)[1]
            assert not fault, f"planner {shorten(line, 600)}: {fault}"
    finally:
        signal.signal(signal.SIGALRM, before)
    assert statuses[2] > statuses[0] > 0
    assert seen == set(COMMANDS) == set(cli.list_commands(None))  # type: ignore[arg-type]


# Folders that somebody else wrote.

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
