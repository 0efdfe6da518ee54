"""`planner validate` typed wrongly: one sentence, before anything is measured."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from planner.cli import main

ROOT = Path(__file__).parents[2]


def test_contradictions_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.touch()
    for arguments, words in (
        (["native:swin_tiny", "--replay", str(file)], "a MODEL and --replay were both given"),
        (["--matrix", "m.yaml", "--replay", str(file)], "a --matrix and --replay were both given"),
        (["--replay", str(tmp_path / "none.jsonl")], "does not exist.\nName a file of records"),
        (["native:swin_tiny", "--budget", "-5s"], "a duration is a number with a unit"),
    ):
        assert main(["validate", *arguments]) == 2
        printed = capsys.readouterr()
        assert words in printed.err
        assert printed.out == ""
        assert "to measure on" not in printed.err


def test_a_file_that_is_no_matrix_is_one_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "m.yaml"
    file.write_text("- 1\n")
    assert main(["validate", "--matrix", str(file), "--list"]) == 2
    assert "has no groups" in capsys.readouterr().err


def test_the_commands_that_the_docs_name_can_be_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each matrix of docs/how-it-works.md is listed by its own command; measuring is a device's."""
    lines = (ROOT / "docs" / "how-it-works.md").read_text().splitlines()
    commands = [shlex.split(line) for line in lines if line.startswith("planner validate --matrix")]
    assert len(commands) == 3
    monkeypatch.chdir(ROOT)
    for command in commands:
        command[command.index("--record") + 1] = str(tmp_path / "r.jsonl")
        assert main([*command[1:], "--list", "--device", "cpu"]) == 0, command
        assert "rows, 0 of them" in capsys.readouterr().out
