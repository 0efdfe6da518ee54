"""`planner tune` through the real command: real probes of a tiny Swin on the CPU, and bad input."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planner.cli import main
from planner.cli.measure import TuneRequest, tune_arguments
from planner.cli.measure import tune as tune_command
from planner.core.errors import UsageError
from planner.core.schema import TrainSetting
from planner.core.units import GIB
from search.loop.options import read_options
from search.loop.records import read_records
from tests.search.test_loader import make_folder

TINY = [
    "native:swin_tiny", "--set", "embed_dim=16", "--set", "depths=1,1", "--set", "num_heads=1,2",
    "--image-size", "32", "--set", "window_size=4", "--num-classes", "10", "--device", "cpu",
    "--compile", "off", "--attention", "eager", "--optimizer", "adamw", "--precision", "fp32",
    "--checkpointing", "none", "--batch-size", "2,4",
]  # fmt: skip


def test_it_tunes_with_real_probes_and_goes_on_from_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one real search of the default run: the command in a process of its own, then again."""
    arguments = ["tune", *TINY, "--trials", "1", "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "planner", *arguments], capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = read_records(tmp_path / "probes.jsonl").records
    assert len(records) == 1
    result = json.loads((tmp_path / "recommendation.json").read_text())
    assert TrainSetting.model_validate(result["setting"]) in [r.setting for r in records]
    assert result["evidence"]["status"] == "measured"
    assert "Recommended for native:swin_tiny" in done.stdout
    assert "probe 1 of 1" in done.stderr
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["setting"] == result["setting"]
    assert read_records(tmp_path / "probes.jsonl").records == records


def test_what_is_typed_wins_over_what_it_begins_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wish = ["--gpu", "rtx 3090", "--memory", "2GiB", "--batch-size", "256", "--keep", "compile"]
    assert main(["advise", "native:swin_tiny", *wish, "--num-classes", "10", "--json"]) == 0
    file = tmp_path / "advice.json"
    file.write_text(capsys.readouterr().out)
    ways = json.loads(file.read_text())["ways"]

    def asked(*typed: str, device: str = "cpu") -> dict[str, Any]:
        words = ["--from", str(file), "--device", device, *typed]
        return tune_arguments(TuneRequest.read(tune_command.make_context("tune", words).params))

    with pytest.raises(UsageError, match=r"is for rtx-3090.*no GPU answers here"):
        asked(device="auto")
    found = asked("--way", "2")
    way = ways[1]["setting"]
    assert (found["model"].num_classes, found["memory_bytes"]) == (10, 2 * GIB)
    assert (found["global_batch"], found["start"]["batch_size"]) == (256, way["batch_size"])
    assert found.get("allocator") == ways[1]["allocator"]
    found = asked("--memory", "3GiB", "--batch-size", "8", "--num-classes", "5", "--gpus", "2")
    assert (found["model"].num_classes, found["memory_bytes"]) == (5, "3GiB")
    assert "global_batch" not in found
    del found["model"]
    assert read_options(found).base.world_size == 2
    assert main(["tune", "--way", "2"]) == 2
    assert main(["tune", "--from", str(file), "--way", "99"]) == 2


def test_data_that_are_none_are_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["--data", str(make_folder(tmp_path / "pictures")), "--output", str(tmp_path / "run")]
    assert main(["tune", *("1" if word == "10" else word for word in TINY), *data]) == 2
    assert "has 2 classes" in capsys.readouterr().err
    assert not (tmp_path / "run").exists(), "refused before anything"
