"""`planner emit`, through the real command line."""

from pathlib import Path

import pytest
import yaml

from planner.cli import main
from planner.core.schema import TrainSetting
from planner.core.schema.record import Recommendation
from tests.trainers.cases import recommendation, tiny


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
    assert sorted(file.name for file in folder.iterdir()) == [
        "ds_config.json", "pictures.py", "train.py", "train_deepspeed.py",
    ]  # fmt: skip
    out, err = capsys.readouterr()
    assert out == ""
    assert "Wrote" in err
    file = result / "mine.py"
    assert main(["emit", str(result), "--for", "pytorch", "--output", str(file)]) == 0
    assert "class Step:" in file.read_text()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--for", "tim"], 2, "unknown trainer 'tim'. Did you mean 'timm'"),
        (["--for", "timm", "--set", "accumulate"], 2, "--set takes FIELD=VALUE"),
        (["--for", "timm", "--set", "embed_dim=64"], 2, "would make another model"),
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
    ("target", "found", "name", "said"),
    [
        ("pytorch", recommendation(tiny(), TrainSetting(batch_size=4, precision="fp32")),
         "named.py", "python {} DATA"),
        ("timm", recommendation(), "a b.yaml", "-c '{}' --data-dir"),
    ],
)  # fmt: skip
def test_the_launch_line_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    target: str, found: Recommendation, name: str, said: str,
) -> None:  # fmt: skip
    (tmp_path / "recommendation.json").write_text(found.model_dump_json())
    monkeypatch.chdir(tmp_path)
    assert main(["emit", ".", "--for", target, "--output", name]) == 0
    line = said.format(name)
    assert line in capsys.readouterr().err.splitlines()[-1]
    run = next(text for text in Path(name).read_text().splitlines() if "Run:" in text)
    assert line in run


def test_a_file_of_somebody_else_s_is_not_replaced(
    result: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["emit", str(result), "--for", "accelerate", "--output", str(result / "c.py")]
    beside = result / "train.py"
    beside.write_text("precious = 1\n")
    assert main(arguments) == 1
    assert "train.py exists, and 'planner emit' did not write it" in capsys.readouterr().err
    assert beside.read_text() == "precious = 1\n"
    assert not (result / "c.py").exists(), "both or none"
    assert main([*arguments, "--force"]) == 0
    assert "def build_model" in beside.read_text()
    assert main(arguments) == 0, "its own earlier output is replaced"


def test_a_link_is_not_followed_unasked(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not even to an earlier output: it lies where nobody named it."""
    real, link = result / "real.yaml", result / "link.yaml"
    assert main(["emit", str(result), "--for", "timm", "--output", str(real)]) == 0
    before = real.read_text()
    link.symlink_to(real)
    arguments = ["emit", str(result), "--for", "timm", "--output", str(link)]
    assert main(arguments) == 1
    assert real.read_text() == before
    assert "--force" in capsys.readouterr().err
