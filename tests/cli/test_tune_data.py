"""`planner tune --data` through the real command: step, loader and both together, on the CPU."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from planner.cli import main
from planner.core.schema.loading import FedRecord
from planner.core.schema.result import Recommendation
from tests.cli.test_tune import TINY, command, environment, planner
from tests.search.feeding.pictures import make_folder

FEW = ["--trials", "2", "--no-baseline", "--precision", "fp32", "--checkpointing", "none"]


@pytest.mark.release
def test_it_finds_the_step_then_the_loader_and_proves_both(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "pictures", classes=4, each=16, side=64)
    before = sorted(folder.rglob("*"))
    run = tmp_path / "run"
    arguments = ["tune", *TINY, *FEW, "--data", str(folder), "--output", str(run)]
    done = planner(*arguments, "--budget", "4m", timeout=900)
    assert done.returncode == 0, done.stderr
    found = Recommendation.model_validate_json((run / "recommendation.json").read_text())
    assert found.setting is not None
    feeding = found.feeding
    assert feeding is not None, found.notes
    assert feeding.evidence.data.num_items == 64
    assert feeding.loader.batch_size == found.setting.batch_size
    assert feeding.loader.image_size == (32, 32)
    assert feeding.together is not None, feeding.notes
    assert feeding.together.status == "measured", feeding.together.message
    assert feeding.together.setting == found.setting
    said = " ".join(done.stdout.split())  # a paragraph, wrapped where its figures let it
    assert f"Fed from {folder} (64 items in 4 classes)" in said
    assert "The data have 4 classes and the model 10" in said
    assert sorted(folder.rglob("*")) == before, "nothing is written into the data"
    # The same command goes on in both parts, where the first run left something to be measured.
    again = planner(*arguments, "--budget", "4m", "--json", timeout=900)
    assert again.returncode == 0, again.stderr
    gone_on = Recommendation.model_validate(json.loads(again.stdout)).feeding
    assert gone_on is not None
    lines = (run / "fed.jsonl").read_text().splitlines()
    assert [FedRecord.model_validate_json(line).status for line in lines][:1] == ["measured"]
    # What `planner data` left is taken as it is, and the run that proved it too.
    third = planner(*arguments[: arguments.index("--data")], "--with-data", str(run / "data"),
                    "--output", str(run), "--json", timeout=900)  # fmt: skip
    assert third.returncode == 0, third.stderr
    kept = Recommendation.model_validate(json.loads(third.stdout)).feeding
    assert kept is not None
    assert kept.loader == gone_on.loader


@pytest.mark.release
def test_data_of_which_nothing_loads_leave_the_step(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "pictures", classes=1, each=8)
    for picture in folder.rglob("*.jpg"):
        picture.write_bytes(b"no picture")
    run = tmp_path / "run"
    done = planner("tune", *TINY, *FEW, "--data", str(folder), "--output", str(run),
                   "--budget", "4m", timeout=900)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = Recommendation.model_validate_json((run / "recommendation.json").read_text())
    assert found.setting is not None
    assert found.feeding is None
    said = [note for note in found.notes if "data could not be measured" in note]
    assert len(said) == 1, found.notes


@pytest.mark.release
def test_an_interrupt_while_loaders_are_probed_ends_with_the_step(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "pictures", side=64)
    run = tmp_path / "run"
    tuner = subprocess.Popen(
        command("tune", *TINY, *FEW, "--data", str(folder), "--output", str(run)),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
        start_new_session=True,
        # A suite started in the background ignores interrupts, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert tuner.stderr is not None
    told = iter(tuner.stderr.readline, "")
    assert any("loaders;" in line for line in told), "the loader's search began"
    tuner.send_signal(signal.SIGINT)
    out, err = tuner.communicate(timeout=120)
    assert tuner.returncode == 130, err
    assert "Recommended for native:swin_tiny" in out
    assert "Traceback" not in err
    found = Recommendation.model_validate_json((run / "recommendation.json").read_text())
    assert found.setting is not None
    assert found.feeding is None or found.feeding.together is None
    left = subprocess.run(
        ["ps", "-o", "pid=", "-s", str(tuner.pid)], capture_output=True, text=True
    )
    assert left.stdout.strip() == ""


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--data", "nowhere"], 2, "there is"),
        (["--data", "PICTURES", "--num-classes", "1"], 2, "has 2 classes"),
        (["--data", "PICTURES", "--with-data", "run"], 2, "omit one"),
        (["--with-data", "nowhere"], 2, "cannot be read"),
        (["--with-data", "PICTURES"], 2, "data.json cannot be read"),
    ],
)  # fmt: skip
def test_data_that_are_none_are_one_error(
    tmp_path: Path, arguments: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(make_folder(tmp_path / "pictures"))
    given = [folder if a == "PICTURES" else a for a in arguments]
    returned = main(["tune", *TINY, *given, "--output", str(tmp_path / "run")])
    error = capsys.readouterr().err
    assert returned == status, error
    assert said in error
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists(), "refused before anything"
