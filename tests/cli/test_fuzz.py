"""Command lines that nobody would type: none ends in a traceback, hangs, or has another exit status
than those that are documented."""

from __future__ import annotations

import io
import os
import random
import signal
import subprocess
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import click
import pytest

from planner.cli import COMMANDS, cli, main
from planner.core.errors import PlannerError, _words, shorten
from planner.estimation.arguments import ALL_FIELDS
from tests.cli.test_help import command_context

STATUSES = {0, 1, 2, 130}
HANGS_SECONDS = 120  # a line of these takes some hundredths of a second on an idle machine
# By itself each of these is wrong nearly everywhere.
HOSTILE = (
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
    raise PlannerError("no process is started, and nothing is timed, in this test.")


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
        self.words = (*ALL_FIELDS, *_words(), "", "no such", "é")

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
        return self.random.choice(self.random.choice((HOSTILE, self.files)))


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
    return said, "" if status == 0 or said.strip() else f"{status} without a word"


def run_lines(seed: int, count: int, files: tuple[str, ...], capsys: Any) -> Counter[int]:
    """How often each status came."""
    lines = Lines(seed, files)
    statuses: Counter[int] = Counter()
    before = signal.signal(signal.SIGALRM, hangs)
    try:
        faults = [
            f"planner {shorten(line, 600)}: {fault}"
            for line in (lines.line() for _ in range(count))
            if (fault := fault_of(line, capsys, statuses)[1])
        ]
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not faults, "\n".join([f"{len(faults)} faults", *faults[:50]])
    return statuses


def test_no_line_ends_in_a_traceback(files: tuple[str, ...], capsys: Any) -> None:
    statuses = run_lines(0, 250, files, capsys)
    assert statuses[2] > statuses[0] > 0


def test_every_command_is_among_the_lines() -> None:
    lines = Lines(0, ("file",))
    assert {lines.line()[0] for _ in range(300)} == set(COMMANDS) == set(cli.list_commands(None))  # type: ignore[arg-type]
