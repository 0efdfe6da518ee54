"""The plain script on two gloo ranks."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from planner.core.schema import TrainSetting
from planner.libraries.missing_operators import declare_missing_operators
from planner.trainers.emission import emit_setting
from planner.trainers.plan import Emitted
from tests.trainers.cases import FakeEstimator, tiny
from tests.trainers.ranks import follow

declare_missing_operators()
import torch  # noqa: E402

ROOT = Path(__file__).parents[2]
DRIVE = Path(__file__).with_name("drive.py")
STEPS = 4
# Nothing is drawn at random, which each rank would do by itself.
PLAIN: dict[str, Any] = {
    "precision": "fp32", "attention": "eager", "loss": "cross-entropy", "clip_grad": False,
}  # fmt: skip


def script(place: Path, **fields: Any) -> Emitted:
    """What is emitted for `fields`, written into the folder `place` as train.py."""
    setting = TrainSetting(**{**PLAIN, **fields})
    emitted = emit_setting(tiny("native"), setting, "pytorch", estimator=FakeEstimator())
    emitted.write(place)
    return emitted


def arguments(place: Path) -> list[str]:
    return [
        str(place / "train.py"), "data", "--steps", str(STEPS), "--lr", "1e-3", "--workers", "0",
        "--device", "cpu", "--log-every", "1", "--output", str(place / "out"),
    ]  # fmt: skip


def trained_alone(place: Path, **fields: Any) -> tuple[dict[str, Any], str]:
    """(the checkpoint, what was printed) of the script on one device, in this process."""
    script(place, **fields)
    with (
        patch.object(sys, "argv", [str(DRIVE), *arguments(place)]),
        contextlib.redirect_stdout(io.StringIO()) as out,
    ):
        runpy.run_path(str(DRIVE), run_name="__main__")
    return torch.load(place / "out" / "last.pt"), out.getvalue()


TWO = {"world_size": 2, "batch_size": 2, "accumulate": 2}
ONE = {"batch_size": 4, "accumulate": 2}


@pytest.mark.parametrize(
    "fields",
    [
        {"parallelism": "ddp", "ddp_bucket_view": True},
        {"parallelism": "fsdp", "clip_grad": True},
    ],
    ids=str,
)
@pytest.mark.trainers
def test_two_ranks_train_as_one(fields: dict[str, Any], tmp_path: Path) -> None:
    """The same 16 images, in the same global batches: the same weights, up to the order of sums."""
    plain = {k: v for k, v in fields.items() if k == "clip_grad"}
    alone, said = trained_alone(tmp_path / "alone", **ONE, **plain)
    several, output = trained(tmp_path / "several", **{**TWO, **fields})
    assert output.count(f"step {STEPS}/{STEPS}  epoch") == 1, "one log, rank 0's"
    assert losses(output) == pytest.approx(losses(said), abs=2e-4)
    assert list(alone["model"]) == list(several["model"])
    for name, weight in alone["model"].items():
        torch.testing.assert_close(several["model"][name], weight, rtol=0, atol=2e-5)


def trained(place: Path, **fields: Any) -> tuple[dict[str, Any], str]:
    """As `trained_alone`, by the launch line of several devices."""
    words = shlex.split(script(place, **fields).launch.replace("LR", "1e-3"))
    words[words.index("train.py") :] = [str(DRIVE), *arguments(place)]
    code, output = follow(
        words, place, {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    )
    assert code == 0, output[-6000:]
    return torch.load(place / "out" / "last.pt"), output


def losses(output: str) -> list[float]:
    found = [float(loss) for loss in re.findall(r"^step .*  loss (\S+)", output, re.MULTILINE)]
    assert len(found) == STEPS
    return found
