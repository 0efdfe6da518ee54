"""`planner emit`, through the real command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from planner.cli import main
from tests.emit.cases import recommendation


@pytest.fixture
def result(tmp_path: Path) -> Path:
    (tmp_path / "recommendation.json").write_text(recommendation().model_dump_json())
    return tmp_path


def test_the_file_goes_to_standard_output_and_warnings_to_error(
    result: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["emit", str(result), "--for", "timm"]) == 0
    out, err = capsys.readouterr()
    assert yaml.safe_load(out)["batch_size"] == 128
    assert "Warning: The learning rate is" in err
    assert "Run: python train.py -c args.yaml" in err


def test_output_writes_both_files(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = result / "out"
    assert main(["emit", str(result), "--for", "deepspeed", "--output", str(folder)]) == 0
    assert sorted(file.name for file in folder.iterdir()) == ["building.py", "ds_config.json"]
    out, err = capsys.readouterr()
    assert out == ""
    assert "Wrote" in err
    file = result / "mine.py"
    assert main(["emit", str(result), "--for", "pytorch", "--output", str(file)]) == 0
    assert "def optimizer_step(" in file.read_text()


def test_set_changes_a_field(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["emit", str(result), "--for", "timm", "--set", "accumulate=4"]
    assert main([*arguments, "--set", "precision=fp16"]) == 0
    out, err = capsys.readouterr()
    values = yaml.safe_load(out)
    assert (values["grad_accum_steps"], values["amp_dtype"]) == (4, "float16")
    assert "Warning: Not measured" in err


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--for", "tim"], 2, "unknown trainer 'tim'. Did you mean 'timm'"),
        (["--for", "timm", "--set", "accumulate"], 2, "--set takes FIELD=VALUE"),
        (["--for", "timm", "--set", "accumulate=x"], 2, "accumulate:"),
        ([], 2, "--for"),
        (["--for", "microsoft"], 1, "fp16 only, not bf16"),
    ],
)
def test_faults_are_a_line_and_a_status(
    result: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int,
    message: str,
) -> None:  # fmt: skip
    assert main(["emit", str(result), *arguments]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no result at"),
        ('{"format": 1, "status"', "is not whole JSON"),
        ('{"format": 7}', "result format 7"),
    ],
)
def test_faults_of_the_file_are_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    file = tmp_path / "recommendation.json"
    if content is not None:
        file.write_text(content)
    assert main(["emit", str(file), "--for", "timm"]) == 2
    assert message in capsys.readouterr().err
