"""The live table on a real pseudo-terminal: what it shows, and how it leaves the terminal."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("pyte", reason="pyte is the terminal, and not installed")

from tests.cli.terminals import Terminal, python
from tests.cli.test_tune import TINY
from tests.search.test_signals import ARGUMENTS

ROOT = Path(__file__).parents[2]
GRID = ROOT / "tests/truth/cpu_grid_2026-11-20.jsonl"
INT, TERM = signal.SIGINT, signal.SIGTERM
WAY_OUT = "Ctrl-C ends with the best so far"


def search(folder: Path, *more: str) -> list[str]:
    """A search of a second over an invented device; with --wait it stays at its second probe."""
    return python("tests.search.typed", *ARGUMENTS, "--output", str(folder), *more)


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


def test_a_signal_leaves_the_terminal_whole(tmp_path: Path) -> None:
    with Terminal(search(tmp_path, "--wait"), columns=40, rows=10) as terminal:
        await_second_probe(terminal)
        for number in (TERM, INT):
            terminal.send(number)
            time.sleep(0.05)
        assert terminal.wait() == 143
        terminal.assert_whole()
        assert "Recommended for native:swin_tiny" in terminal.text()


@pytest.mark.release
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
        assert "Traceback" not in terminal.text(), terminal.text()


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
import sys, time, warnings
from planner.cli.progress import show_on
with show_on("planner [red]tune") as show:
    show.show_status(show.status.begun("a [bold]model\\x1b[2J", 1, time.monotonic()))
    time.sleep(1)
    warnings.warn("of somebody else")
    print("half a line", end="", file=sys.stderr)
    time.sleep(1)
    raise ValueError("unforeseen")
"""
    with Terminal([sys.executable, "-c", code]) as terminal:
        table = terminal.await_table(r"a \[bold\]model\\x1b\[2J")
        assert "planner [red]tune" in table.splitlines()[0]
        assert terminal.wait() == 1
        terminal.assert_whole()
        lines = terminal.lines()
        assert any("UserWarning: of somebody else" in line for line in lines)
        assert "ValueError: unforeseen" in lines
        assert any("half a line" in line for line in lines)


ANSWERS = (
    ("estimate", "native:swin_tiny", "--batch-size", "64", "--gpu", "rtx-3090"),
    ("estimate", "native:swin_tinny"),
    ("advise", "native:swin_tiny", "--batch-size", "256", "--gpu", "rtx-3060-12gb",
     "--keep", "compile"),
    ("tune", "--replay", str(GRID)),
)  # fmt: skip


@pytest.mark.parametrize("arguments", ANSWERS)
def test_no_answer_is_wider_than_the_terminal(arguments: tuple[str, ...]) -> None:
    """Else the terminal breaks words."""
    with Terminal(python("planner", *arguments), columns=66, rows=60) as terminal:
        terminal.wait()
        lines = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", terminal.raw).decode().splitlines()
        assert len(lines) > 1
        assert [line for line in lines if len(line) > 66] == []


@pytest.mark.parametrize(("name", "value"), [("CI", "true"), ("TERM", "xterm")])
def test_a_table_and_colours_only_where_a_terminal_has_them(name: str, value: str) -> None:
    with Terminal(replay(), rows=60, environment={name: value}) as terminal:
        assert terminal.wait() == 0
        terminal.assert_whole()
        assert "[search] probe 2: batch 128" in terminal.text()
        is_drawn = "╭".encode() in terminal.raw
        assert (is_drawn, b"\x1b[1m" in terminal.raw) == (name != "CI",) * 2
        assert (b"\x1b[32m" in terminal.raw) == (value == "xterm")


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
    ended = subprocess.run(replay("-q", "--json"), capture_output=True, text=True, check=True)
    assert (ended.stderr, json.loads(ended.stdout)["status"]) == ("", "recommended")


def test_quiet_keeps_errors_and_warnings(tmp_path: Path) -> None:
    ended = subprocess.run(
        python("planner", "tune", "--replay", str(tmp_path / "none"), "--quiet"),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert "does not exist" in ended.stderr


VALIDATED = [*TINY[:11], "--device", "cpu", "--batch-size", "2", "--precision", "fp32",
             "--checkpointing", "none", "--compile", "off", "--attention", "eager"]  # fmt: skip


def test_validate_shows_its_rows_and_ends_whole(tmp_path: Path) -> None:
    command = python("planner", "validate", *VALIDATED, "--record", str(tmp_path / "r.jsonl"))
    with Terminal(command, environment={"OMP_NUM_THREADS": "1"}) as terminal:
        terminal.await_table("row 1 of 1: ", "the same command goes on from there")
        terminal.send(INT)
        assert terminal.wait() == 130, terminal.text()
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


@pytest.mark.release
def test_real_probes_are_shown_and_nothing_is_forked_beside_the_thread(tmp_path: Path) -> None:
    # Batches whose steps take long enough to be told of, twice a second.
    command = [sys.executable, "-c", UNFORKED, "tune", *TINY[:-1], "512,1024", "--trials", "2",
               "--output"]  # fmt: skip
    with Terminal([*command, str(tmp_path)], environment={"OMP_NUM_THREADS": "1"}) as terminal:
        terminal.await_table(r"timing steps: \d+ so far, [0-9.]+ m?s each")
        assert terminal.wait() == 0
        terminal.assert_whole()
        assert b"FORKED" not in terminal.raw


def test_a_trace_shows_how_long_it_takes_and_ends_at_once(tmp_path: Path) -> None:
    """On a terminal. Ctrl-C ends the process that traces too, without a traceback."""
    made = "import os, pathlib, time\n\n\ndef build():\n"
    made += "    pathlib.Path('tracer').write_text(str(os.getpid()))\n    time.sleep(600)\n"
    (tmp_path / "waiting.py").write_text(made)
    code = f"import os; os.chdir({str(tmp_path)!r}); from planner.cli import main; "
    code += "raise SystemExit(main(['estimate', 'waiting:build']))"
    with Terminal([sys.executable, "-c", code]) as terminal:
        terminal.await_seen(lambda: bool(re.search(r"^[3-9] s$", terminal.text(), re.MULTILINE)))
        terminal.await_seen((tmp_path / "tracer").exists)
        tracer = int((tmp_path / "tracer").read_text())
        terminal.press(b"\x03")
        assert terminal.wait() == 130
        said = [line for line in terminal.lines() if line]
        assert said[0].startswith("Tracing waiting:build on fake tensors")
        assert said[-1] == "Error: interrupted."
        assert "Traceback" not in terminal.text()
        terminal.assert_whole()
    with pytest.raises(ProcessLookupError):
        os.kill(tracer, 0)
