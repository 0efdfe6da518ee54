"""The live table on a real pseudo-terminal: what it shows, and how it leaves the terminal."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("pyte", reason="pyte is the terminal, and not installed")

from planner.cli.live import Screen
from tests.cli.terminals import Terminal, python
from tests.cli.test_tune import TINY
from tests.search.test_signals import ARGUMENTS

ROOT = Path(__file__).parents[2]
GRID = ROOT / "tests/truth/cpu_grid_2026-11-20.jsonl"
INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
WAY_OUT = "Ctrl-C ends with the best so far"


def search(folder: Path, *more: str) -> list[str]:
    """A search of a second over an invented device; with --wait it stays at its second probe."""
    return python("tests.search.typed", *ARGUMENTS, "--output", str(folder), *more)


# A search that stands still, without what a real one imports.
STILL = """
import sys, time
from planner.cli.progress import show_on
from planner.report.standing import Ended
try:
    with show_on("planner tune native:swin_tiny") as show:
        now, title = time.monotonic(), "batch 8, fp32, adamw, checkpointing none, attention eager"
        ended = Ended(1, title, "12 images/s", "3.00 GiB")
        show.say(f"[search] probe 1 of 7: {title}")
        standing = show.standing.limited(7, 60, now).finished(ended, ended)
        show.stand(standing.begun(title, 2, now, 30, "search"))
        time.sleep(300)
except KeyboardInterrupt:
    sys.exit(130)
"""


def still(**terminal: Any) -> Terminal:
    return Terminal([sys.executable, "-c", STILL], **terminal)


def end(terminal: Terminal) -> None:
    terminal.press(b"\x03")
    assert terminal.wait() == 130
    terminal.assert_whole()


def replay(*more: str) -> list[str]:
    return python("planner", "tune", "--replay", str(GRID), *more)


def await_second_probe(terminal: Terminal) -> str:
    """The table while the second probe waits for a signal."""
    terminal.await_seen(lambda: any(row == "waiting" for row in terminal.lines()), "the wait")
    return terminal.await_table("probe 2")


def test_it_shows_what_runs_the_best_so_far_and_how_to_end_it(tmp_path: Path) -> None:
    with Terminal(search(tmp_path, "--wait", "--trials", "7")) as terminal:
        await_second_probe(terminal)
        table = terminal.await_table(
            "probe 2 of 7", r"starting · \d+ s of ", "1 of 7 probes", WAY_OUT,
            r"best [0-9.]+ images/s, [0-9.]+ [GM]iB: batch ",
        )  # fmt: skip
        first = next(row for row in table.splitlines() if "starting" in row)
        terminal.await_seen(  # the clock goes on while nothing happens
            lambda: any("starting" in row and row != first for row in terminal.table()), "a tick"
        )
        assert "[search] probe 1 of 7: batch" in terminal.text()
        terminal.press(b"\x03")
        terminal.await_text("what was measured is kept")  # while the worker is wound up
        assert terminal.wait() == 130
        terminal.assert_whole()
        assert "Recommended for native:swin_tiny" in terminal.text()
        assert "probe 1 of 7: batch" in terminal.text()  # the line stays


@pytest.mark.parametrize(
    ("signals", "status"),
    [
        pytest.param((INT, INT), 130, marks=pytest.mark.combinations),
        ((TERM, INT), 143),
        pytest.param((HUP,), 129, marks=pytest.mark.combinations),
    ],
)
def test_a_signal_leaves_the_terminal_whole(
    tmp_path: Path, signals: tuple[signal.Signals, ...], status: int
) -> None:
    with Terminal(search(tmp_path, "--wait")) as terminal:
        await_second_probe(terminal)
        for number in signals:
            terminal.send(number)
            time.sleep(0.05)
        assert terminal.wait() == status
        terminal.assert_whole()
        assert "Recommended for native:swin_tiny" in terminal.text()


@pytest.mark.repeated
@pytest.mark.parametrize("seed", range(20))
def test_an_interrupt_at_any_moment_leaves_the_terminal_whole(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    with Terminal(search(tmp_path), columns=random.randint(40, 200)) as terminal:
        terminal.await_text("settings;")
        moment = time.monotonic() + random.uniform(0.0, 1.0)
        while time.monotonic() < moment:
            terminal.see(0.01)
        terminal.press(b"\x03")
        status = terminal.wait()
        # 0 and -INT: all was done, and Python itself about to end.
        assert status in (0, 130, -INT), terminal.text()
        if status == 130:
            terminal.assert_whole()
        assert not any(c in terminal.text() for c in "╭│╰"), terminal.text()
        assert "Traceback" not in terminal.text()


def test_a_window_that_is_closed_ends_the_search_with_its_result(tmp_path: Path) -> None:
    with Terminal(search(tmp_path, "--wait")) as terminal:
        await_second_probe(terminal)
        os.close(terminal.slave)
        terminal.slave = os.open(os.devnull, os.O_RDWR)
        terminal.hang_up()
        terminal.wait()
    found = json.loads((tmp_path / "recommendation.json").read_text())
    assert "its terminal was closed" in found["stopped_because"]
    assert found["num_probes"] == 1


def test_an_exception_and_what_others_print_stay_readable() -> None:
    code = """
import sys, time, warnings, click
from planner.cli.progress import show_on
with show_on("planner [red]tune") as show:
    show.stand(show.standing.begun("a [bold]model\\x1b[2J", 1, time.monotonic()))
    time.sleep(1)
    warnings.warn("of somebody else")
    click.echo("by click", err=True)
    print("half a line", end="", file=sys.stderr)
    time.sleep(1)
    raise ValueError("unforeseen")
"""
    with Terminal([sys.executable, "-c", code]) as terminal:
        terminal.await_table()
        assert "planner [red]tune" in terminal.table()[0]
        assert r"a [bold]model\x1b[2J" in terminal.text()
        assert terminal.wait() == 1
        terminal.assert_whole()
        lines = terminal.lines()
        assert any("UserWarning: of somebody else" in line for line in lines)
        assert {"by click", "half a line", "ValueError: unforeseen"} <= set(lines)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_it_is_stopped_and_goes_on_in_a_shell(tmp_path: Path) -> None:
    script = tmp_path / "still.py"
    script.write_text(STILL)
    shell = ["bash", "--norc", "--noprofile", "--noediting", "-i"]
    with Terminal(shell, environment={"PS1": "> "}) as terminal:
        terminal.press(f"{sys.executable} {script}\n".encode())
        terminal.await_table()
        terminal.press(b"\x1a")
        terminal.await_text("Stopped")
        terminal.await_seen(lambda: terminal.lines()[terminal_row(terminal)] == ">", "the prompt")
        assert not terminal.table()
        terminal.press(b"stty -a | grep -o ' echo '; fg\n")
        terminal.await_table()
        assert "\n echo\n" in terminal.text()
        terminal.press(b"\x03")
        terminal.await_seen(lambda: not terminal.table(), "the end")
        terminal.press(b"echo status $?\n")
        terminal.await_text("status 130")
        drawn = len(terminal.raw)
        terminal.press(f"{sys.executable} {script} &\n".encode())
        terminal.await_seen(lambda: terminal.text().count("probe 1 of 7") == 2, "its line")
        until = time.monotonic() + 1.0  # in which it would have been drawn
        while time.monotonic() < until:
            terminal.see()
        assert "╭".encode() not in terminal.raw[drawn:]  # it is not in front
        terminal.press(b"kill %1; exit\n")
        terminal.wait()


def terminal_row(terminal: Terminal) -> int:
    return len(terminal.screen.history.top) + terminal.screen.cursor.y


@pytest.mark.parametrize(
    ("columns", "rows"),
    [
        (40, 8),
        *(pytest.param(*size, marks=pytest.mark.combinations) for size in ((60, 10), (200, 50))),
    ],
)
def test_it_fits_any_terminal(columns: int, rows: int) -> None:
    with still(columns=columns, rows=rows) as terminal:
        terminal.await_table("images/s")
        assert len(terminal.table()) < rows
        assert all(len(row) < columns for row in terminal.table())
        end(terminal)


def test_it_is_drawn_anew_when_the_terminal_is_resized() -> None:
    with still(columns=120) as terminal:
        terminal.await_table()
        for columns in (48, 150, 70):
            terminal.resize(columns, 24)
            widths = {min(columns - 1, 132)}
            terminal.await_seen(
                lambda widths=widths: {len(row) for row in terminal.table()} == widths,  # type: ignore[misc]
                f"{columns} columns",
            )
            assert terminal.text().count("╭") == 1  # nothing of the one before is left
        end(terminal)


def test_a_terminal_without_utf8_has_a_frame_of_ascii() -> None:
    with still(environment={"PYTHONIOENCODING": "ascii"}) as terminal:
        terminal.await_table()
        assert terminal.raw.isascii()
        assert terminal.table()[0].startswith("+-")
        end(terminal)


@pytest.mark.parametrize("name", ["NO_COLOR", "COLORTERM"])
def test_colours_are_left_out_where_nobody_wants_them(name: str) -> None:
    with still(environment={name: "1"}) as terminal:
        terminal.await_table("12 images/s")
        coloured = re.search(rb"\x1b\[[0-9;]*(3[0-7]|38|9[0-7])[0-9;]*m", terminal.raw)
        assert bool(coloured) == (name != "NO_COLOR")
        end(terminal)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TERM", "dumb"),
        *(
            pytest.param(*said, marks=pytest.mark.combinations)
            for said in (("TERM", ""), ("CI", "true"))
        ),
    ],
)
def test_plain_lines_where_lines_cannot_be_written_over(name: str, value: str) -> None:
    with still(environment={name: value}) as terminal:
        terminal.await_text("[search] probe 1 of 7: batch 8")
        terminal.press(b"\x03")
        assert terminal.wait() == 130
        assert b"\x1b" not in terminal.raw


def test_lines_wrap_again_though_an_interrupt_dropped_the_end_of_a_frame() -> None:
    """The kernel drops what a terminal has not read yet where Ctrl-C is pressed."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as seen, os.fdopen(writing, "w") as stream:
        screen = Screen(stream)
        screen.show([], ["a table"])
        assert b"a table" in seen.read(1 << 16)  # dropped
        screen.show([], [])
        assert b"\x1b[?7h" in seen.read(1 << 16)


def test_a_replay_leaves_its_lines_and_no_flicker() -> None:
    with Terminal(replay(), rows=60) as terminal:
        assert terminal.wait() == 0
        terminal.assert_whole()
        assert "[search] probe 11: batch 32" in terminal.text()
        assert terminal.raw.count("╭".encode()) <= 8  # of 22 events


def test_quiet_shows_the_result_only() -> None:
    with Terminal(replay("--quiet"), rows=60) as terminal:
        assert terminal.wait() == 0
        assert b"\x1b" not in terminal.raw
        assert terminal.text().strip().startswith("Recommended for")
    ended = subprocess.run(replay("-q", "--json"), capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    assert json.loads(ended.stdout)["status"] == "recommended"


def test_json_is_all_of_standard_output_and_rich_is_imported_only_for_a_table() -> None:
    code = (
        "import sys; from planner.cli import main; status = main(sys.argv[1:]);"
        "assert not {m for m in sys.modules if m.split('.')[0] == 'rich'}; sys.exit(status)"
    )
    command = [sys.executable, "-c", code, *replay("--json")[3:]]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout)["status"] == "recommended"
    assert "[calibrate] probe 1: batch 8" in ended.stderr
    assert "\x1b" not in ended.stderr


def test_quiet_keeps_errors_and_warnings(tmp_path: Path) -> None:
    ended = subprocess.run(
        python("planner", "tune", "--replay", str(tmp_path / "none"), "--quiet"),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert "does not exist" in ended.stderr
    rows = ["native:swin_tiny", "--device", "cpu", "--budget", "1s", "--quiet"]
    ended = subprocess.run(
        python("planner", "validate", *rows, "--record", str(tmp_path / "r.jsonl")),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ended.stderr == "8 of the list are left for the same command.\n"


VALIDATED = [*TINY[:11], "--device", "cpu", "--batch-size", "2", "--precision", "fp32",
             "--checkpointing", "none", "--compile", "off", "--attention", "eager"]  # fmt: skip


@pytest.mark.parametrize(
    ("number", "status"), [(INT, 0), pytest.param(TERM, 143, marks=pytest.mark.combinations)]
)
def test_validate_shows_its_rows_and_ends_whole(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    command = python("planner", "validate", *VALIDATED, "--record", str(tmp_path / "r.jsonl"))
    with Terminal(command, environment={"OMP_NUM_THREADS": "1"}) as terminal:
        terminal.await_table("row 1 of 1: ", "the same command goes on from there")
        terminal.send(number)
        assert terminal.wait() == status, terminal.text()
        terminal.assert_whole()
        assert "Stopped. The same command goes on from here." in terminal.text()
        assert "1 of the list are left" in terminal.text()


# What forks this process by itself would find the drawing thread's locks as they were.
UNFORKED = """
import os, sys
os.register_at_fork(before=lambda: os.write(2, b"FORKED"))
from planner.cli import main
sys.exit(main())
"""


@pytest.mark.workers
def test_real_probes_are_shown_and_nothing_is_forked_beside_the_thread(tmp_path: Path) -> None:
    # Batches whose steps take long enough to be told of: twice a second.
    command = [sys.executable, "-c", UNFORKED, "tune", *TINY[:-1], "64,128", "--trials", "3",
               "--output"]  # fmt: skip
    with Terminal([*command, str(tmp_path)], environment={"OMP_NUM_THREADS": "1"}) as terminal:
        terminal.await_table(r"timing steps: \d+ so far, [0-9.]+ m?s each")
        assert terminal.wait() == 0
        terminal.assert_whole()
        assert b"FORKED" not in terminal.raw


@pytest.mark.workers
def test_data_shows_its_loaders(tmp_path: Path) -> None:
    command = python("planner", "data", str(tmp_path / "pictures"), "--synthetic", "40", "--trials",
                     "2", "--workers", "0,1", "--batch-size", "8", "--image-size", "32",
                     "--output", str(tmp_path / "run"))  # fmt: skip
    with Terminal(command, rows=50) as terminal:
        terminal.await_table("best", "planner data ")
        assert terminal.wait() == 0, terminal.text()
        terminal.assert_whole()
