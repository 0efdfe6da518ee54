"""`planner profile` as it is typed: whose setting it runs, and one line for each mistake."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from planner.cli import main
from planner.cli.profile import _asked
from planner.core.errors import UsageError
from planner.core.schema import TrainSetting
from planner.core.schema.result import Recommendation
from tests.cli.test_tune import command, environment
from tests.trainers.cases import recommendation, tiny

MODEL = tiny("native")
SMALL = [
    "native:swin_tiny", "--set", "embed_dim=16", "--set", "depths=1,1", "--set", "num_heads=1,2",
    "--image-size", "32", "--set", "window_size=4", "--device", "cpu", "--precision", "fp32",
    "--batch-size", "2",
]  # fmt: skip


def write(folder: Path, found: Recommendation) -> Path:
    folder.mkdir()
    (folder / "recommendation.json").write_text(found.model_dump_json())
    return folder


def test_a_run_gives_its_model_and_setting_and_options_change_them(tmp_path: Path) -> None:
    found = recommendation(MODEL, TrainSetting(precision="fp32", batch_size=8))
    run = write(tmp_path / "run", found)
    for target in (run, run / "recommendation.json"):
        model, setting = _asked(str(target), {"fields": ()})
        assert model == found.model
        assert (setting.precision, setting.batch_size) == ("fp32", 8)
    changed = _asked(str(run), {"batch_size": "4", "fields": ("checkpointing=blocks",)})[1]
    assert (changed.batch_size, changed.checkpointing) == (4, "blocks")
    with pytest.raises(UsageError, match="embed_dim would make another model"):
        _asked(str(run), {"fields": ("embed_dim=64",)})


def test_a_run_that_found_nothing_says_what_would_help(tmp_path: Path) -> None:
    found = recommendation(MODEL).model_copy(
        update={"status": "nothing_fits", "setting": None, "evidence": None,
                "stopped_because": "nothing fits", "advice": "Try --image-size 192."}
    )  # fmt: skip
    with pytest.raises(UsageError, match=r"recommends nothing: nothing fits\.\nTry --image-size"):
        _asked(str(write(tmp_path / "run", found)), {"fields": ()})


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["gone"], 2, "there is no run gone and no such model."),
        ([".", "--device", "cpu"], 2, "recommendation.json does not exist."),
        (["gone/recommendation.json"], 2, "gone/recommendation.json does not exist."),
        (["native:swin_tiny", "--batch-size", "1,2"], 2, "a profile is of one setting, and 2 "),
        (["native:swin_tiny", "--deadline", "soon"], 2, "a duration is a number with a unit"),
        (["native:swin_tiny", "--deadline", "0s"], 2, "--deadline 0s is no time to run in"),
        ([""], 2, "RUN|MODEL has no value."),
        (["native:swin_tiny", "--steps", "0"], 2, "0 is not in the range"),
        (["native:swin_tiny", "--output", ""], 2, "--output has no value."),
        (["native:swin_tiny", "--device", "gpu"], 2, "gpu"),
    ],
)
def test_a_mistake_is_one_error(
    arguments: list[str], status: int, said: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["profile", *arguments]) == status
    err = capsys.readouterr().err
    assert err.startswith("Error: ")
    assert said in err
    assert list(tmp_path.iterdir()) == []


def test_a_signal_ends_it_with_one_line_and_nothing_left(tmp_path: Path) -> None:
    output = tmp_path / "out"
    running = subprocess.Popen(
        command("profile", *SMALL, "--steps", "100", "--output", str(output)),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(),
    )  # fmt: skip
    assert running.stderr is not None
    for line in running.stderr:
        if line.startswith("Building the model"):
            break
    assert os.listdir(output), "its files are on their way"  # noqa: PTH208
    running.send_signal(signal.SIGTERM)
    _, rest = running.communicate(timeout=120)
    assert running.returncode == 128 + signal.SIGTERM
    assert rest.splitlines()[-1] == "Error: interrupted: no profile was written."
    assert "Traceback" not in rest
    assert not output.exists()
