"""What `tune` is asked: by the command and from Python, whatever is no question is one error."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.cli import main
from planner.cli.tune import command
from planner.core.errors import PlannerError, UsageError
from planner.core.schema import SwinConfig, TrainSetting
from planner.machine.hardware.detect import read_device
from search import tune
from search.loop.options import (
    SearchKeywords,
    SearchOptions,
    declared_options,
)
from search.loop.result.recommend import recommend
from search.loop.result.summary import Summary
from search.loop.space import make_space
from search.loop.study.records import format_record
from tests.search.tables import GPU, MODEL, make_record

NAN = float("nan")


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--steps", "0"], 2, "--steps"),
        (["--epochs", "nan"], 2, "epochs are a number above 0"),
        (["--images-per-epoch", "5"], 2, "no epochs are asked for"),
        (["--trials", "-1"], 2, "--trials"),
        (["--headroom", "-1"], 2, "share"),
        (["--budget", "-5s"], 2, "duration"),
        (["--seed", "4294967296"], 2, "seed"),
        (["--global-batch", "0"], 2, "--global-batch"),
        (["--gpus", "0"], 2, "--gpus"),
        (["--gpus", "3", "--device", "cpu", "--global-batch", "16"], 2, "a multiple of 3"),
        (["--gpus", "2", "--parallelism", "none,ddp"], 2, "not one on 2 GPUs"),
        (["--gpus", "2", "--parallelism", "dpp"], 2, "Did you mean 'ddp'"),
        (["--gpus", "3", "--nodes", "2"], 2, "a multiple of 2"),
        (["--gpus", "2", "--set", "world_size=4"], 2, "world_size 4"),
        (["--set", "nodes=2,3"], 2, "--gpus and --nodes"),
        (["--gpus", "2", "--data", "."], 2, "on one device"),
        (["--gpus", "2", "--replay", "x"], 2, "omit gpus"),
        (["--steps", "5", "--epochs", "5"], 2, "omit one"),
        (["--precision", ""], 2, "--precision has no value"),
        (["--storage", ""], 2, "--storage has no value"),
        (["--batch-size", "8,x"], 2, "'x'"),
        (["--set", "embed-dim=x"], 2, "embed_dim"),
        (["--set", "embed_dim=24", "--set", "embed-dim=24"], 2, "given twice"),
        (["--storage", "sqlite:///"], 2, "names no file"),
        (["--set", "frozen_stages=9"], 1, "4 stages"),
        (["--set", "optimizer=lion-fused"], 1, "no fused"),
        (["--replay", "x", "--precision", "bf16"], 2, "omit device, precision"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_what_is_no_search_is_said_in_a_few_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, said: str
) -> None:
    here = [] if "--output" in arguments else ["--output", str(tmp_path)]
    device = [] if "--device" in arguments else ["--device", "cpu"]
    assert main(["tune", "native:swin_tiny", *device, *here, *arguments]) == status
    out, err = capsys.readouterr()
    assert said in err
    assert out == ""
    assert not list(tmp_path.glob("recommendation.json"))


@pytest.mark.parametrize("place", ["file", "file/below", "x" * 300, "/proc/nothing", "dangling"])
def test_an_output_that_cannot_be_made_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing" / "there")
    arguments = ["tune", "native:swin_tiny", "--device", "cpu", "--output", str(tmp_path / place)]
    assert main(arguments) == 2
    assert "cannot be made a folder" in capsys.readouterr().err


def test_a_replay_needs_a_folder_too(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--replay", str(table), "--output", str(table)]) == 2
    assert "cannot be made a folder" in capsys.readouterr().err


def test_a_replay_of_another_model_says_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.jsonl"
    tiny = SwinConfig(name="swin_tiny", embed_dim=48)
    table.write_bytes(format_record(make_record(TrainSetting(), model=tiny)))
    assert main(["tune", "native:swin_tiny", "--replay", str(table)]) == 2
    assert "another native:swin_tiny: embed_dim 48 and not 96" in capsys.readouterr().err
    assert main(["tune", "--replay", str(table), "--image-size", "64"]) == 2
    assert "so image_size cannot be changed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"restrict": {"precison": ("bf16",)}}, "Did you mean 'precision'"),
        ({"restrict": {"precision": ()}}, "names none"),
        ({"restrict": ["bf16"]}, "by axis"),
        ({"headroom": -1}, "headroom is a share"),
        ({"tolerance": NAN}, "tolerance is a share"),
        ({"trials": -1}, "trials is a number from 0"),
        ({"nodes": 0}, "nodes is a number from 1"),
        ({"budget_seconds": NAN}, "budget_seconds"),
        ({"memory_bytes": NAN}, "from 1 byte"),
        ({"epochs": 0}, "epochs are a number above 0"),
        ({"images_per_epoch": None, "epochs": 1}, "images_per_epoch"),
        ({"seed": None}, "seed"),
        ({"batch_size": 0}, "batch_size"),
        ({"global_batch": 8, "base": {"accumulate": 3}}, "accumulate follows"),
        ({"base": {"batchsize": 3}}, "batchsize: no such field"),
        ({"base": {"precision": "fp32"}}, "precision is what is searched"),
        ({"base": 3}, "base must be a mapping"),
        ({"storage": ""}, "storage is a name"),
        ({"study_name": 3}, "study_name is a name"),
        ({"output": 3}, "output is a path"),
        ({"replay": ""}, "replay is a path"),
        ({"strategy": None}, "unknown strategy None"),
        ({"model": 3}, "a model is"),
        ({"model": None}, "no model"),
        ({"headroom": -1, "trials": -1}, "2 faults"),
    ],
    ids=lambda v: str(v)[:60] if isinstance(v, dict) else "",
)
def test_what_python_cannot_mean_is_a_usage_error(
    tmp_path: Path, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        tune(**{"model": MODEL, "device": "cpu", "output": tmp_path, **arguments})
    assert not list(tmp_path.iterdir())


def test_a_device_is_read_alike_everywhere() -> None:
    for text, device in (("CPU", "cpu"), ("cpu:0", "cpu"), ("CUDA:1", "cuda:1"), ("auto", "auto")):
        assert read_device(text) == device
    for text in ("cpu:7", "cuda:", "cuda:-1", "cuda:" + "9" * 5000, "", "gpu"):
        with pytest.raises(PlannerError, match="unknown device"):
            read_device(text)


def test_the_advice_is_of_what_ended_the_search() -> None:
    """Used-up trials and a model that hangs were both told to allow more time."""
    search = Summary(MODEL, GPU, {}, None, TrainSetting(), trials_used=4)
    assert "Allow more with --trials" in recommend([], search).advice
    hung = make_record(TrainSetting()).model_copy(
        update={
            "status": "timed_out", "phase": "build", "step_seconds": (), "images_per_second": None,
            "flags": ("cut short: the budget ended",),
        }
    )  # fmt: skip
    advice = recommend([hung], Summary(MODEL, GPU, {}, None, TrainSetting())).advice
    assert "the last was at: build" in advice


def test_what_holds_for_every_probe_is_checked_without_what_is_searched() -> None:
    """A batch of 64 of such images has more windows than sdpa takes, and smaller ones have not."""
    large = SwinConfig(image_size=(1792, 1792))
    space = make_space(large, GPU, restrict={"attention": ("sdpa",), "compile": ("off",)})
    assert max(c.setting.batch_size for c in space.candidates) > 0


def test_a_way_out_that_is_none_is_not_offered() -> None:
    huge = SwinConfig(image_size=(28_000, 28_000))
    with pytest.raises(PlannerError, match=r"Choose attention eager\."):
        planner.estimate(huge, batch_size=1)


def test_an_option_is_declared_once() -> None:
    """`tune` takes what is declared, and the command has a flag of each that has a text."""
    assert set(SearchKeywords.__annotations__) == set(declared_options())
    assert SearchOptions.of({}) == SearchOptions()
    flags = {flag for parameter in command.params for flag in parameter.opts}
    for name, said in declared_options().items():
        assert not said.text or (said.flag or f"--{name.replace('_', '-')}") in flags


@pytest.mark.parametrize(
    ("keyword", "says"),
    [("budget", "mean 'budget_seconds'"), ("precision", "restrict={'precision': …}"),
     ("clip_grad", "base={'clip_grad': …}"), ("gpus", "gpus is a number")],
)  # fmt: skip
def test_a_keyword_that_is_none_says_what_was_meant(keyword: str, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        tune(MODEL, **{keyword: "10m"})


def test_every_argument_of_tune_is_documented() -> None:
    described = set(re.findall(r"^ {4}(\w+): ", inspect.getdoc(tune) or "", re.MULTILINE))
    parameters = {"model", "estimator", "prober", "on_progress"}
    assert described >= parameters | set(declared_options(SearchOptions))
