"""The command line as a shell sees it: status, standard output and standard error apart."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from planner.cli import cli, main
from planner.machine.hardware import all_gpus

PLANNER = Path(sys.executable).with_name("planner")


def test_the_console_command_reports_an_error_without_a_traceback() -> None:
    typed = [PLANNER, "gpus", "h10"]
    done = subprocess.run(typed, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("Error: unknown GPU 'h10'. Did you mean 'h100-sxm-80gb'")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [["gpus", "--json"], ["tune", "--help"]])
@pytest.mark.skipif(os.name != "posix", reason="a reader that leaves is a POSIX pipe's affair")
def test_a_reader_that_leaves_is_not_an_error(arguments: list[str]) -> None:
    """Standard output is a pipe whose reading end is closed before the command writes."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [PLANNER, *arguments], stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert done.stderr == ""
    assert done.returncode == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk is full here")
def test_a_full_disk_is_said() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [PLANNER, "gpus"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.stderr.endswith("written: No space left on device.\nWrite it elsewhere.\n")
    assert done.returncode == 1


def test_a_closed_standard_output_is_told_of(tmp_path: Path) -> None:
    """And the next file that is opened does not get its number, and what is printed."""
    file = tmp_path / "swin.json"
    file.write_text('{"embed_dim": 48}')
    command = f'"{PLANNER}" estimate {file} --json'
    lost = "Error: standard output is closed, and the answer is lost.\nWrite: > FILE\n"
    for closed, said in ((">&-", lost), ("<&- >&- 2>&-", "")):
        done = subprocess.run(
            ["sh", "-c", f"{command} {closed}"], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (1, said)
        assert done.stdout == ""
    assert file.read_text() == '{"embed_dim": 48}'


def test_what_is_typed_cannot_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An escape code in a name, a path or a file is shown, not obeyed."""
    file = tmp_path / "red.yaml"
    file.write_text('name: "\\e[31mred"')
    for arguments in (
        ["estimate", "native:\x1b[31mred"],
        ["estimate", "\x1b[31m.yaml"],
        ["estimate", str(file)],
        ["gpus", "\x1b[31m"],
        ["\x1b[31m"],
    ):
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert "\x1b" not in said
        assert r"\x1b[31m" in said


def test_an_unknown_command_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimat"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    first, second = captured.err.strip().split("\n")
    assert first == "Error: unknown command 'estimat'. Did you mean 'estimate' or 'emulate'?"
    assert second == "List commands with 'planner --help'."


def test_a_field_that_is_no_option_is_written_as_a_field(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["estimate", "native:swin_tiny", "--window-size", "12"]) == 2
    assert "No such option '--window-size'. Write --set window_size=VALUE." in (
        capsys.readouterr().err
    )
    for typed, option in (("--batch_size", "--batch-size"), ("--world-size", "--gpus")):
        assert main(["tune", "native:swin_tiny", typed, "2"]) == 2
        assert f"No such option '{typed}'. Write {option}." in capsys.readouterr().err
    assert main(["gpus", "--window-size", "12"]) == 2  # takes no --set
    assert "--set" not in capsys.readouterr().err


def test_ctrl_c_is_a_line_and_a_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command()
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "get_command", lambda ctx, name: interrupted)
    assert main(["gpus"]) == 130
    assert capsys.readouterr() == ("", "\nError: interrupted.\n")


def test_gpus_lists_all_and_some(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpus"]) == 0
    table = capsys.readouterr().out
    assert all(gpu.name in table for gpu in all_gpus())
    assert main(["gpus", "h100", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [gpu["name"] for gpu in listed] == ["h100-sxm-80gb", "h100-pcie-80gb", "h100-nvl-94gb"]
    assert listed[0]["bf16_flops"] == 989.5e12
    assert listed[0]["sources"]["bf16_flops"]


def test_several_names_are_the_words_of_one_gpu_or_several_gpus(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def listed(*names: str) -> list[str]:
        assert main(["gpus", *names, "--json"]) == 0
        return [gpu["name"] for gpu in json.loads(capsys.readouterr().out)]

    assert all("-ti" in name for name in listed("rtx", "ti"))
    assert listed("t4", "a30") == [*listed("t4"), *listed("a30")]
    assert main(["gpus", "t4", "h10"]) == 2
    assert "unknown GPU 'h10'" in capsys.readouterr().err
