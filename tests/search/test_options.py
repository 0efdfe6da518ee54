"""What a search was asked comes back: from what its result keeps, and from the command it shows.
What `tune` is asked: by the command and from Python, whatever is no question is one error."""

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

from planner.cli import main
from planner.cli.measure import TuneRequest, tune_arguments
from planner.cli.measure import tune as command
from planner.core.errors import PlannerError, UsageError
from planner.core.schema import TrainSetting
from planner.machine.hardware.gpu import read_device
from search import tune
from search.loop.options import SearchOptions, read_options
from tests.search.tables import MODEL


def test_what_is_no_search_is_said_in_a_few_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for line, status, said in (
        ("--trials -1", 2, "--trials"),
        ("--headroom -1", 2, "share"),
        ("--gpus 2 --parallelism dpp", 2, "--parallelism: Input should be 'none', 'ddp'"),
        ("--storage=", 2, "--storage has no value"),
        ("--gpu t4", 2, "--from x.json' begins there"),
        ("--precision fp16", 1, "fp32 and bf16"),
        ("--set loss=cross-entropy,hinge", 2, "hinge"),
        (f"--output {tmp_path}/file/below", 2, "cannot be made a folder"),
        ("--storage study", 2, "neither"),
    ):
        output = [] if "--output" in line else ["--output", str(tmp_path / "run")]
        arguments = ["tune", "native:swin_tiny", "--device", "cpu", *output, *line.split()]
        assert main(arguments) == status, line
        out, err = capsys.readouterr()
        assert said in err, line
        assert out == ""
        # A storage may lie in the folder.
        assert "--storage" in line or not (tmp_path / "run").exists(), line


def test_what_python_cannot_mean_is_a_usage_error(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"restrict": {"precison": ("bf16",)}}, "Did you mean 'precision'"),
        ({"tolerance": float("nan")}, "tolerance: Input should be a finite number"),
        ({"global_batch": 8, "base": {"accumulate": 3}}, "accumulate follows"),
        ({"base": {"precision": "fp32"}}, "precision is what is searched"),
        ({"output": 3}, "output is a path"),
        ({"headroom": -1, "trials": -1}, "2 faults"),
        ({"budget": "10m"}, "mean 'budget_seconds'"),
        ({"precision": "10m"}, "restrict={'precision': …}"),
    ]
    for arguments, said in cases:
        with pytest.raises(UsageError, match=re.escape(said)):
            tune(**{"model": MODEL, "device": "cpu", "output": tmp_path, **arguments})
    assert not list(tmp_path.iterdir())


def test_a_device_is_read_alike_everywhere() -> None:
    for text, device in (("CPU", "cpu"), ("cpu:0", "cpu"), ("CUDA:1", "cuda:1"), ("auto", "auto")):
        assert read_device(text) == device
    for text in ("cpu:7", "cuda:", "cuda:-1", "cuda:" + "9" * 5000, "", "gpu"):
        with pytest.raises(PlannerError, match="unknown device"):
            read_device(text)


def test_every_argument_of_tune_is_documented() -> None:
    said = (inspect.getdoc(tune) or "").partition("Returns:")[0]
    others = {"model", "estimator", "prober", "on_progress"}
    assert set(re.findall(r"^ {4}(\w+): ", said, re.M)) == others | set(SearchOptions.model_fields)


# What is typed, and the same in Python.
SAID: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("--batch-size 32 --trials 0 --budget 90s --output runs/it's",
     {"batch_size": 32, "trials": 0, "budget_seconds": 90, "output": Path("runs/it's")}),
    ("--batch-size 8,16 --budget none --tolerance 0.3% --headroom 0.07 --device cuda:1",
     {"batch_size": [8, 16], "budget_seconds": None, "tolerance": 0.003, "headroom": 0.07,
      "device": "cuda:1"}),
    ("--memory 24GB", {"memory_bytes": "24GB"}),
    ("--checkpointing none,blocks,stages:0,1 --precision bf16 --accept-different",
     {"restrict": {"checkpointing": ("none", "blocks", "stages:0,1"), "precision": "bf16"},
      "accept_different": True}),
    ("--set ema=false,true --optimizer adamw-fused",
     {"restrict": {"ema": (False, True), "optimizer": "adamw-fused"}}),
    ("--accumulate 4 --storage a.journal --data pictures",
     {"base": {"accumulate": 4}, "storage": "a.journal", "data": "pictures"}),
    ("--gpus 4 --parallelism fsdp,ddp --global-batch 512 --allocator expandable_segments:True",
     {"gpus": 4, "restrict": {"parallelism": ("fsdp", "ddp")}, "global_batch": 512,
      "allocator": "expandable_segments:True"}),
    ("--start batch_size=24,checkpointing=stages:0,1",
     {"start": {"batch_size": 24, "checkpointing": "stages:0,1"}}),
]  # fmt: skip


@pytest.mark.parametrize(("line", "said"), SAID)
def test_the_command_means_what_python_does_and_a_result_keeps_it(line: str, said: Any) -> None:
    asked = read_options(said)
    words = ["native:swin_tiny", *line.split()]
    typed = tune_arguments(TuneRequest.read(command.make_context("tune", words).params))
    del typed["model"]
    assert read_options(typed) == asked
    assert read_options(json.loads(json.dumps(asked.kept))) == asked


def test_every_option_is_said_once_at_least() -> None:
    """Break: an option that is declared and whose way back nobody tries."""
    missing = {*SearchOptions.model_fields} - {name for _, said in SAID for name in said}
    assert not missing


def test_what_a_base_says_of_axes_is_not_kept() -> None:
    """A whole setting is taken as base, whose axes are what is searched."""
    asked = read_options({"base": TrainSetting(precision="fp32", batch_size=32)})
    kept = asked.kept
    assert kept == {"base": {"batch_size": 32}}
    assert read_options(kept).asked.batch_size == 32


def test_no_password_is_kept() -> None:
    asked = read_options({"storage": "postgresql://me:secret@host/db"})
    assert asked.kept == {"storage": "postgresql://me:***@host/db"}


@pytest.mark.parametrize("kept", [{"colour": 1}, {"headroom": "much"}, {"restrict": {"x": [1]}}])
def test_options_of_another_planner_are_refused(kept: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        read_options(kept)
