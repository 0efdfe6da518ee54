"""However a tuner is ended, what it measured is recommended, and nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from planner.cli import main
from search.loop.interrupts import handle_signals
from search.loop.study.records import read_records
from search.loop.study.storage import storage_faults
from search.tuning import tune as tune_file
from tests.search.typed import SlowProber

ARGUMENTS = [
    "native:swin_tiny", "--batch-size", "8,16,32", "--compile", "off", "--attention", "sdpa",
    "--checkpointing", "none,blocks", "--precision", "fp32,bf16", "--optimizer", "adamw",
    "--strategy", "exhaustive", "--no-baseline", "--allocator", "expandable_segments:False",
]  # fmt: skip
INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def start(until: Path, *arguments: str) -> subprocess.Popen[str]:
    def usual() -> None:
        """A suite started in the background ignores interrupts, and so would what it starts."""
        signal.signal(INT, signal.default_int_handler)
        for number in (TERM, HUP):
            signal.signal(number, signal.SIG_DFL)

    return subprocess.Popen(
        [sys.executable, "-m", "tests.search.typed", *ARGUMENTS, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=usual,
        env={**os.environ, "WINDS_UP_UNTIL": str(until)},
    )  # fmt: skip


def await_line(tuner: subprocess.Popen[str], said: str) -> str:
    heard = ""
    for line in tuner.stderr:
        heard += line
        if said in line:
            return heard
    raise AssertionError(heard)


def test_an_interrupt_ends_with_what_was_measured(tmp_path: Path) -> None:
    """And no further signal breaks that off."""
    tuner = start(tmp_path / "go on", "--wait", "--output", str(tmp_path))
    await_line(tuner, "waiting")
    tuner.send_signal(INT)
    await_line(tuner, "winding up")
    for number in (INT, INT, TERM):
        tuner.send_signal(number)
    (tmp_path / "go on").touch()
    out, err = tuner.communicate(timeout=120)
    assert tuner.returncode == 130, err
    assert "Traceback" not in err
    assert "ended because it was interrupted" in out
    result = json.loads((tmp_path / "recommendation.json").read_text())
    assert "it was interrupted" in result["stopped_because"]
    assert result["num_probes"] == 1


def test_each_signal_has_its_exit_status_and_one_that_is_ignored_stays_so() -> None:
    """`nohup planner tune …` outlives its terminal."""
    before = signal.signal(HUP, signal.SIG_IGN)
    try:
        with handle_signals(HUP) as interrupts:
            signal.raise_signal(HUP)
        assert interrupts.number is None
        signal.signal(HUP, signal.SIG_DFL)
        for number, status in ((INT, 130), (TERM, 143), (HUP, 129)):
            with pytest.raises(KeyboardInterrupt), handle_signals(number) as interrupts:
                signal.raise_signal(number)
            assert interrupts.exit_status == status
        assert signal.getsignal(HUP) == signal.SIG_DFL
    finally:
        signal.signal(HUP, before)


def test_an_interrupt_in_a_destructor_ends_the_search_too() -> None:
    """Python drops what is raised there, and tells of it; other faults there are still told."""

    class Late:
        def __init__(self, befall: Callable[[], object]) -> None:
            self.befall = befall

        def __del__(self) -> None:
            self.befall()

    def interrupted_late() -> None:
        Late(lambda: signal.raise_signal(INT))
        for _ in range(600):
            time.sleep(0.1)

    told: list[object] = []
    before, sys.unraisablehook = sys.unraisablehook, lambda dropped: told.append(dropped.exc_type)
    try:
        with handle_signals(INT) as interrupts:
            Late(lambda: 1 / 0)
            assert told == [ZeroDivisionError]
            with pytest.raises(KeyboardInterrupt):
                interrupted_late()
            assert interrupts.number == INT
            signal.raise_signal(INT)  # the search is ending already
    finally:
        sys.unraisablehook = before
    assert told == [ZeroDivisionError]


def test_signals_are_left_alone_outside_the_main_thread() -> None:
    found: list[object] = []

    def listen() -> None:
        with handle_signals(INT) as interrupts:
            found.append(interrupts.number)

    before = signal.getsignal(INT)
    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert found == [None]
    assert signal.getsignal(INT) is before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk is full here")
def test_a_full_disk_is_said_with_where_the_record_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    free_gpu: None,
) -> None:  # fmt: skip
    output, temporary = tmp_path / "out", tmp_path / "tmp"
    output.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(tune_file, "versions", lambda: {"torch": "test"})
    monkeypatch.setattr(tune_file, "DeviceProber", SlowProber)
    monkeypatch.setattr(tune_file, "device_rates", lambda *_: None)
    (output / "probes.jsonl").symlink_to("/dev/full")
    (output / "recommendation.json").mkdir()  # which no file can be moved onto
    storage = str(tmp_path / "study.journal")
    assert main(["tune", *ARGUMENTS, "--output", str(output), "--storage", storage]) == 1
    out, err = capsys.readouterr()
    assert "Recommended for native:swin_tiny" in out
    kept = next(temporary.glob("planner-*/probes.jsonl"))
    assert len(read_records(kept).records) == 1
    assert kept.parent.stat().st_mode & 0o777 == 0o700  # nobody else reads it or puts a link there
    assert str(kept) in out
    assert f"The probes are in {kept}" in err
    assert not list(output.glob(".*"))  # no half of a file


def test_a_signal_breaks_off_no_statement_of_a_database() -> None:
    done = []

    def statement() -> None:
        with storage_faults("study.db"):
            with storage_faults("study.db"):
                signal.raise_signal(INT)
            done.append("whole")

    with handle_signals(INT) as interrupts:
        with pytest.raises(KeyboardInterrupt):
            statement()
        assert done == ["whole"]
        with storage_faults("study.db"):
            done.append("once")  # what winds up writes, too
        assert interrupts.exit_status == 130
    assert done == ["whole", "once"]
