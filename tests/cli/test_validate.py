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
        (["--replay", ""], "--replay has no value"),
        (["native:swin_tiny", "--record", ""], "--record has no value"),
        (["nosuch:make"], "there is no module 'nosuch'"),
        (["native:swin_tiny", "--budget", "0s"], "--budget 0s is no time"),
        (["native:swin_tiny", "--budget", "-5s"], "a duration is a number with a unit"),
    ):
        assert main(["validate", *arguments]) == 2
        printed = capsys.readouterr()
        assert words in printed.err
        assert printed.out == ""
        assert "to measure on" not in printed.err


def test_an_unwritable_record_is_noticed_before_the_first_row(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["validate", "native:swin_tiny", "--device", "cpu", "--record"]
    assert main([*arguments, str(tmp_path / "nowhere" / "r.jsonl")]) == 1
    printed = capsys.readouterr().err
    assert "cannot be written" in printed
    assert "--record" in printed
    assert "to measure on" not in printed


def test_what_there_was_no_time_for_is_counted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["validate", "native:swin_tiny", "--device", "cpu", "--budget", "1s"]
    assert main([*arguments, "--record", str(tmp_path / "r.jsonl")]) == 0
    assert "8 of the list are left for the same command." in capsys.readouterr().err


def test_a_replay_of_no_records_is_a_fault(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "r.jsonl"
    file.write_bytes(bytes(range(256)) * 9)
    assert main(["validate", "--replay", str(file)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "no record was read" in printed.err


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff\xfe\x00", "not text"),
        (b"\x00\x01", "not YAML"),
        (b"[" * 5000, "nested more than"),
        (b"groups: " + b"9" * 5000, "thousands of digits"),
        (b"groups: [1\n", "not YAML"),
        (b"- 1\n", "has no groups"),
    ],
)
def test_a_file_that_is_no_matrix_is_one_error(
    data: bytes, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "m.yaml"
    file.write_bytes(data)
    assert main(["validate", "--matrix", str(file), "--list"]) == 2
    printed = capsys.readouterr().err
    assert words in printed
    assert printed.count("\n") <= 2


def test_the_commands_that_the_docs_name_can_be_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each matrix of docs/how-it-works.md is listed by its own command; measuring is a device's."""
    lines = (ROOT / "docs" / "how-it-works.md").read_text().splitlines()
    commands = [shlex.split(line) for line in lines if line.startswith("planner validate --matrix")]
    assert len(commands) >= 4
    monkeypatch.chdir(ROOT)
    for command in commands:
        command[command.index("--record") + 1] = str(tmp_path / "r.jsonl")
        assert main([*command[1:], "--list", "--device", "cpu"]) == 0, command
        assert "rows, 0 of them" in capsys.readouterr().out
