"""`planner explain` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

from planner.cli import main
from tests.explaining.messages import REPORTED
from tests.trainers.cases import tiny

MESSAGE = next(r.text for r in REPORTED if "SwinTextSpotter" in r.source)


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


def test_a_card_without_bf16_was_trained_in_fp16(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    """As `planner estimate` takes it, and not refused for a precision that nobody named."""
    log = tmp_path / "train.log"
    log.write_text(MESSAGE)
    model = tmp_path / "model.json"
    model.write_text(tiny().model_dump_json())
    assert main(["explain", str(log), str(model), "--gpu", "T4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["expected"]["setting"]["precision"] == "fp16"
    asked_bytes = {lever["command"].split("--memory ")[1] for lever in found["relief"]["levers"]}
    assert all(text.endswith("MiB") for text in asked_bytes)


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
