"""What `tune` is asked: by the command and from Python, whatever is no question is one error."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from planner.cli import main
from planner.core.errors import PlannerError, UsageError
from planner.core.schema.validation import declared_options
from planner.machine.hardware.gpu import read_device
from search import tune
from search.loop.options import SearchKeywords, SearchOptions
from tests.search.tables import MODEL


def test_what_is_no_search_is_said_in_a_few_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for line, status, said in (
        ("--steps 0", 2, "--steps"),
        ("--epochs nan", 2, "epochs are a number above 0"),
        ("--headroom -1", 2, "share"),
        ("--gpus 3 --global-batch 16", 2, "a multiple of 3"),
        ("--gpus 2 --parallelism dpp", 2, "Did you mean 'ddp'"),
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
        ({"tolerance": float("nan")}, "tolerance is a share"),
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


def test_an_option_is_declared_once() -> None:
    assert set(SearchKeywords.__annotations__) == set(declared_options(SearchOptions))
    assert SearchOptions.of({}) == SearchOptions()


def test_every_argument_of_tune_is_documented() -> None:
    described = set(re.findall(r"^ {4}(\w+): ", inspect.getdoc(tune) or "", re.MULTILINE))
    parameters = {"model", "estimator", "prober", "on_progress"}
    assert described >= parameters | set(declared_options(SearchOptions))
