"""How a search is shown: what is drawn on a real pseudo-terminal, plain lines, and neither. What
rich draws and erases is rich's."""

import io
import json
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import click
import pytest
from rich.cells import cell_len

from planner.cli import main
from planner.cli.show import Show, show_on
from planner.core import terminal
from planner.core.schema import TrainSetting
from planner.core.terminal import has_live_terminal, shows_seconds
from search.loop.prober import Progress
from search.loop.space import candidate

TYPED = (sys.executable, "-m", "tests.search.typed", "native:swin_tiny")
ON_A_TERMINAL = {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "24"}
PLAIN = ("CI", "NO_COLOR", "TTY_INTERACTIVE")


def test_a_long_silence_has_a_word_where_nobody_watches_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "SILENT_SECONDS", 0.001)
    said = ""
    with shows_seconds(), shows_seconds():  # one within another says nothing of its own
        while said.count("Still working: 0 s.\n") < 2:
            said += capsys.readouterr().err


@pytest.mark.timeout(240)
def test_it_shows_what_runs_the_best_so_far_and_how_to_end_it(tmp_path: Path) -> None:
    """The search stays at its second probe until Ctrl-C, and leaves the terminal whole."""
    asked = (
        "--batch-size", "8,16,32", "--compile", "off", "--attention", "sdpa", "--optimizer",
        "adamw", "--tolerance", "0%", "--output", str(tmp_path), "--wait", "--trials", "7",
    )  # fmt: skip
    process, terminal = pty.fork()
    if process == 0:
        known = {name: value for name, value in os.environ.items() if name not in PLAIN}
        os.execve(TYPED[0], (*TYPED, *asked), known | ON_A_TERMINAL)
    before, written = termios.tcgetattr(terminal), b""

    def said() -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode(errors="replace"))

    for pattern in (
        "probe 1 of 7: batch", "waiting", "probe 2 of 7: batch",
        r"start · .* · best [0-9.]+ images/s", "Ctrl-C ends with the best so far",
        r"(?s)start · (\d+) s .*start · (?!\1 )\d+ s ",  # while nothing happens
    ):  # fmt: skip
        while not re.search(pattern, said()):
            written += os.read(terminal, 1 << 16)
    os.write(terminal, b"\x03")
    try:
        while True:
            written += os.read(terminal, 1 << 16)
    except OSError:  # its other end is closed
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 130
    assert "Ctrl-C" not in said().partition("Recommended for native:swin_tiny")[2]
    assert written.rfind(b"\x1b[?25l") < written.rfind(b"\x1b[?25h"), "the cursor is hidden"
    assert termios.tcgetattr(terminal) == before
    os.close(terminal)


def test_no_line_is_drawn_but_where_a_person_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert has_live_terminal({"TERM": "xterm"})
    for environment in ({}, {"TERM": "dumb"}, {"TERM": "xterm", "CI": "true"}):
        assert not has_live_terminal(environment)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not has_live_terminal({"TERM": "xterm"})
    with show_on() as show:
        assert not show.is_live


def test_what_is_drawn_is_no_wider_than_asked_and_no_markup() -> None:
    """rich erases a frame by the height of the one that it drew before; a wrap is a row more."""
    show, setting = Show(is_live=True), TrainSetting(batch_size=8)
    show.update(Progress("start", stage="[red]a\x1b[2J\r\n\x9bm", candidate=candidate(setting)))
    whole, *cut = (show.render(width).plain for width in (300, 40, 8))
    assert whole.startswith(r"[[red]a\x1b[2J \x9bm] probe 0: batch 8")
    for text, width in zip(cut, (40, 8), strict=True):
        assert [cell_len(line) <= width for line in text.split("\n")] == [True, True]


@pytest.mark.parametrize(
    "arguments",
    [
        ("estimate", "native:swin_tiny", "--batch-size", "64", "--gpu", "rtx-3090"),
        ("advise", "native:swin_tiny", "--batch-size", "64", "--gpu", "rtx-3090"),
    ],
)  # fmt: skip
def test_no_answer_is_wider_than_the_terminal(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the terminal breaks words."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "66")
    main(list(arguments))
    lines = click.unstyle(capsys.readouterr().out).splitlines()
    assert len(lines) > 1
    assert [line for line in lines if len(line) > 66] == []


def test_json_is_all_of_standard_output_and_quiet_is_all_of_standard_error(
    tmp_path: Path,
) -> None:
    command = (
        *TYPED, "--trials", "2", "--json", "--output", str(tmp_path), "--allocator",
        "expandable_segments:False",
    )  # fmt: skip
    loud, quiet = (
        subprocess.run([*command, *more], capture_output=True, text=True, check=True)
        for more in ((), ("--quiet",))
    )
    assert json.loads(loud.stdout)["status"] == "recommended"
    assert "[calibrate] probe 1 of 2: batch" in loud.stderr
    assert (quiet.stderr, json.loads(quiet.stdout)["status"]) == ("", "recommended")
