"""What a search was asked comes back: from what its result keeps, and from the command it shows.
What `tune` is asked: by the command and from Python, whatever is no question is one error."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from planner.cli import main
from planner.cli.measure import TuneRequest, keywords
from planner.cli.measure import tune as command
from planner.core.errors import PlannerError, UsageError
from planner.core.schema import FactoryModel, NamedModel, TrainSetting
from planner.libraries.named import override_named
from planner.libraries.resolve import resolve_model
from planner.machine.hardware.gpu import read_device
from search import tune
from search.loop.options import SearchOptions, model_flags, read_options, tune_command
from tests.search.tables import MODEL


def test_what_is_no_search_is_said_in_a_few_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for line, status, said in (
        ("--steps 0", 2, "--steps"),
        ("--epochs nan", 2, "--epochs: Input should be a finite number (got 'nan')\n"),
        ("--headroom -1", 2, "share"),
        ("--gpus 3 --global-batch 16", 2, "a multiple of 3"),
        ("--gpus 2 --parallelism dpp", 2, "--parallelism: Input should be 'none', 'ddp'"),
        ("--storage=", 2, "--storage has no value"),
        ("--set embed_dim=24 --set embed-dim=24", 2, "given twice"),
        ("--set frozen_stages=9", 1, "4 stages"),
        ("--gpu t4", 2, "--from x.json' begins there"),
        ("--precision fp16", 1, "fp32 and bf16"),
        ("--storage study", 2, "neither"),
        ("--set loss=cross-entropy,hinge", 2, "hinge"),
        (f"--output {tmp_path}/file/below", 2, "cannot be made a folder"),
    ):
        output = [] if "--output" in line else ["--output", str(tmp_path / "run")]
        arguments = ["tune", "native:swin_tiny", "--device", "cpu", *output, *line.split()]
        assert main(arguments) == status, line
        out, err = capsys.readouterr()
        assert said in err, line
        assert out == ""
    assert not list(tmp_path.glob("**/recommendation.json"))


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
    described = set(re.findall(r"^ {4}(\w+): ", inspect.getdoc(tune) or "", re.MULTILINE))
    parameters = {"model", "estimator", "prober", "on_progress"}
    assert described >= parameters | set(SearchOptions.model_fields)


# Each way to say every option, with values that a shell or a parser could spoil.
SAID: list[dict[str, Any]] = [
    {},
    {"batch_size": 32, "trials": 20, "budget_seconds": 90, "output": Path("my runs/it's $HOME")},
    {"batch_size": [8, 16], "budget_seconds": None, "tolerance": 0.003, "headroom": 0.07},
    {"budget_seconds": 5400.0, "memory_bytes": 24 * 1024**3, "device": "cuda:1"},
    {"budget_seconds": 0.1 + 0.2, "memory_bytes": "24GB", "epochs": 0.1},
    {"epochs": 300, "accept_different": True},
    {"restrict": {"checkpointing": ("none", "blocks", "stages:0,1"), "precision": "bf16"}},
    {"restrict": {"ema": (False, True), "frozen_stages": (0, 2), "optimizer": "adamw-fused"}},
    {"base": {"accumulate": 4}, "steps": 1000, "storage": "a.journal"},
    {"gpus": 2, "allocator": "expandable_segments:True,max_split_size_mb:64"},
    {"gpus": 4, "restrict": {"parallelism": ("fsdp", "ddp")}, "global_batch": 512},
    {"data": "my pictures", "headroom": 0.0},
    {"trials": 0},
    {"start": {"batch_size": 24, "checkpointing": "stages:0,1", "optimizer": "adamw-fused"}},
]


def typed(line: str) -> SearchOptions:
    """What the command itself makes of a line for a shell."""
    program, name, *words = shlex.split(line)
    assert (program, name) == ("planner", "tune")
    asked = keywords(TuneRequest.read(command.make_context("tune", words).params))
    del asked["model"]
    return read_options(asked)


@pytest.mark.parametrize("said", SAID)
def test_the_command_means_what_was_asked(said: Any) -> None:
    asked = read_options(said)
    assert typed(tune_command("native:swin_tiny", asked)) == asked
    assert read_options(json.loads(json.dumps(asked.kept))) == asked


def test_every_option_is_said_once_at_least() -> None:
    """Break: an option that is declared and whose way back nobody tries."""
    missing = {*SearchOptions.model_fields} - {name for said in SAID for name in said}
    assert not missing


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (
            FactoryModel(factory="mine:build", image_size=(256, 192), in_channels=1),
            "mine:build --image-size 256,192 --set in_channels=1",
        ),
        (
            NamedModel(library="timm", name="vit", task="classification", image_size=(96, 96)),
            "timm:vit --image-size 96",
        ),
    ],
)
def test_what_a_model_s_title_leaves_open_is_said(
    model: FactoryModel | NamedModel, line: str
) -> None:
    """Break: the command of another model of that name."""
    assert tune_command(model.title, SearchOptions(), model_flags(model)) == f"planner tune {line}"
    params = command.make_context("tune", shlex.split(line)).params
    of_model = TuneRequest.read(params).fields.model
    if isinstance(model, FactoryModel):
        assert resolve_model(model.factory, of_model) == model
    else:
        assert override_named(model.model_copy(update={"image_size": (1, 1)}), of_model) == model


def test_a_base_from_python_is_said_by_options_of_the_command() -> None:
    """`base` may hold any field; the command says the same search in other words."""
    base = {"ema": True, "optimizer": "sgd", "world_size": 2, "parallelism": "ddp"}
    line = tune_command("native:swin_tiny", read_options({"base": base}))
    again = typed(line)
    assert "--optimizer sgd,sgd-fused" in line, "as a search tries them where base names a family"
    assert (again.base.world_size, again.base.parallelism) == (2, "ddp")
    assert again.restrict["ema"] == (True,)


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
