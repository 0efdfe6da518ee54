"""However a tuner is ended, what it measured is recommended, and nothing of it is left."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from planner.cli import main
from search.loop.records import read_records
from search.loop.signals import handle_signals, held, interruptible
from search.tuning import tune as tune_file
from tests.search.typed import SlowProber

ARGUMENTS = [
    "native:swin_tiny", "--batch-size", "8,16,32", "--compile", "off", "--attention", "sdpa",
    "--checkpointing", "none,blocks", "--precision", "fp32,bf16", "--optimizer", "adamw",
    "--tolerance", "0%", "--allocator", "expandable_segments:False",
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


def interrupted(until: Path, output: Path) -> subprocess.Popen[str]:
    """A tuner that winds up, after one probe, until a file is there."""
    tuner = start(until, "--wait", "--output", str(output))
    assert any("waiting" in line for line in tuner.stderr)
    tuner.send_signal(INT)
    assert any("winding up" in line for line in tuner.stderr)
    return tuner


def test_an_interrupt_ends_with_what_was_measured(tmp_path: Path) -> None:
    """And no further signal breaks that off but a second Ctrl-C."""
    tuner = interrupted(tmp_path / "go on", tmp_path)
    for number in (TERM, HUP):
        tuner.send_signal(number)
    (tmp_path / "go on").touch()
    out, err = tuner.communicate(timeout=120)
    assert tuner.returncode == 130, err
    assert "Traceback" not in err
    assert "ended because it was interrupted" in out
    result = json.loads((tmp_path / "recommendation.json").read_text())
    assert (result["stopped_because"], result["num_probes"]) == ("it was interrupted", 1)


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


def test_what_is_held_is_done_whole_and_a_second_interrupt_ends_it() -> None:
    """Also one that came in a destructor, where Python drops it: the next part that may be broken
    off is not begun."""
    done = []
    with handle_signals(INT, TERM), held():
        signal.raise_signal(INT)
        done.append("held")
        with pytest.raises(KeyboardInterrupt), interruptible():
            done.append("broken off")
        signal.raise_signal(TERM)
        done.append("wound up")
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(INT)
    assert done == ["held", "wound up"]


def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    tuner = interrupted(tmp_path / "never", tmp_path)
    tuner.send_signal(INT)
    _, err = tuner.communicate(timeout=120)
    assert tuner.returncode == 130, err
    assert "Traceback" not in err
    assert len(read_records(tmp_path / "probes.jsonl").records) == 1


def test_signals_are_left_alone_outside_the_main_thread() -> None:
    found: list[object] = []

    def listen() -> None:
        with handle_signals(INT) as interrupts:
            found.extend((interrupts.number, signal.getsignal(INT)))

    before = signal.getsignal(INT)
    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert found == [None, before]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk is full here")
def test_a_full_disk_is_said_with_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    free_gpu: None,
) -> None:  # fmt: skip
    output = tmp_path / "out"
    output.mkdir()
    monkeypatch.setattr(tune_file, "DeviceProber", SlowProber)
    (output / "probes.jsonl").symlink_to("/dev/full")
    (output / "recommendation.json").mkdir()  # which no file can be moved onto
    assert main(["tune", *ARGUMENTS, "--output", str(output)]) == 1
    out, err = capsys.readouterr()
    assert "Recommended for native:swin_tiny" in out
    assert out.count("The record that was not kept") == 1
    assert "No space left on device" in out
    assert "recommendation.json cannot be written" in err
    assert not list(output.glob(".*"))  # no half of a file
