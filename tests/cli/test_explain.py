"""`planner explain` as it is typed."""

import gzip
import io
import json
import os
import pickle
import sys
from pathlib import Path
from threading import Thread

import pytest

from planner.cli import main
from planner.core.files import to_json
from planner.programs.explanation import explain
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
    asked = ["explain", str(log), str(model), "--batch-size", "64", "--gpu", "rtx 4060"]
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "log"
    assert found["relief"]["advice"]["ways"]
    assert found["expected"]["setting"]["batch_size"] == 64
    plan = tmp_path / "estimate.json"
    assert main(["estimate", *asked[2:], "--json"]) == 0
    plan.write_text(capsys.readouterr().out)
    assert main(["explain", str(log), "--plan", str(plan), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["relief"] == found["relief"]


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
    expected = to_json(explain(file))
    assert expected["findings"][0]["kind"] == "out of memory"
    ours = piped(data)
    try:
        found = to_json(explain(f"/dev/fd/{ours}"))
    finally:
        os.close(ours)
    assert found == {**expected, "source": f"/dev/fd/{ours}"}
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(os.fdopen(piped(data), "rb")))
    assert to_json(explain("-")) == {**expected, "source": "standard input"}
