"""`planner explain` as it is typed."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest

from planner.cli import main
from planner.watching.explaining import opening
from planner.watching.explaining.explanation import explain
from tests.explaining.messages import MESSAGES
from tests.explaining.test_snapshots import failed_snapshot
from tests.trainers.cases import tiny

MESSAGE = next(r.log for r in MESSAGES if "SwinTextSpotter" in r.source)


def test_a_log_is_explained_with_levers(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    log = tmp_path / "train.log"
    log.write_text(f"epoch 0\n{MESSAGE}\n")
    assert main(["explain", str(log)]) == 0
    assert "line 2:" in capsys.readouterr().out
    model = tmp_path / "model.json"
    model.write_text(tiny().model_dump_json())
    asked = ["explain", str(log), str(model), "--batch-size", "64", "--gpu", "rtx 3090"]
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "log"
    assert found["relief"]["levers"]
    assert found["expected"]["setting"]["batch_size"] == 64


def test_what_is_not_recognised_is_status_1_and_what_is_wrong_2(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    log = tmp_path / "train.log"
    log.write_text("all is well\n")
    assert main(["explain", str(log)]) == 1
    assert "recognised" in capsys.readouterr().out
    for wrong in (
        [str(tmp_path / "none")],
        [str(log), "--batch-size", "4"],
        [str(log), "native:swin_tiny", "--batch-size", "4,8"],
        [str(log), "native:swin_tiny", "--plan", str(tmp_path)],
    ):
        assert main(["explain", *wrong]) == 2, wrong
        assert capsys.readouterr().err.startswith("Error: ")


def piped(data: bytes) -> int:
    """A pipe's end to read, of which one writer gives a byte at a time at first."""
    ours, theirs = os.pipe()

    def write() -> None:
        with os.fdopen(theirs, "wb", buffering=0) as file:
            for part in (data[:1], data[1:2], data[2:]):
                file.write(part)

    Thread(target=write, daemon=True).start()
    return ours


@pytest.mark.parametrize("what", ["log", "gzip", "snapshot"])
def test_a_pipe_is_read_once(what: str, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    data = f"{'step 1' * 4000}\n{MESSAGE}\n".encode()
    data = pickle.dumps(failed_snapshot()) if what == "snapshot" else data
    data = gzip.compress(data) if what == "gzip" else data
    file = tmp_path / "file"
    file.write_bytes(data)
    expected = explain(file).to_json()
    assert expected["findings"][0]["kind"] == "out of memory"
    ours = piped(data)
    try:
        found = explain(f"/dev/fd/{ours}").to_json()
    finally:
        os.close(ours)
    assert found == {**expected, "source": f"/dev/fd/{ours}"}
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(os.fdopen(piped(data), "rb")))
    assert explain("-").to_json() == {**expected, "source": "standard input"}


def test_a_named_pipe_is_waited_for_and_not_without_end(
    tmp_path: Path, monkeypatch, capsys
) -> None:  # type: ignore[no-untyped-def]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["sh", "-c", 'printf "%s" "$1" > "$2"', "sh", MESSAGE, str(pipe)]):
        assert main(["explain", str(pipe)]) == 0
    monkeypatch.setattr(opening, "_WAIT_SECONDS", 0.01)
    assert main(["explain", str(pipe)]) == 2
    said = capsys.readouterr().err
    assert "nobody has opened it to write" in said
    (tmp_path / "train.log").write_text(MESSAGE)
    way_out = said.splitlines()[-1].partition(": ")[2]
    way_out = way_out.replace("planner", f"{sys.executable} -m planner", 1)
    done = subprocess.run(way_out, shell=True, cwd=tmp_path, env=os.environ, capture_output=True)
    assert done.stdout.startswith(b"Out of memory")


def test_a_writer_that_is_silent_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.cli.explain._PATIENCE_SECONDS", 0.01)
    ours, theirs = os.pipe()
    said = []

    def end_when_told(text: str, err: bool = False) -> None:
        if text.startswith("Still at"):
            said.append(text)
            os.close(theirs)

    monkeypatch.setattr("planner.cli.explain.click.echo", end_when_told)
    assert main(["explain", f"/dev/fd/{ours}"]) == 1
    os.close(ours)
    assert "it is read until its writer ends" in said[0]
