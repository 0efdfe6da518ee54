"""The plain script on two gloo ranks, and what trainers' files say of several devices."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from planner.core.schema import TrainSetting
from planner.estimation.estimate import resolve
from planner.ledger.ledger import Allocated, Freed, Marked
from planner.libraries.missing_operators import declare_missing_operators
from planner.libraries.registry import find_library
from planner.step.training import record_training
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


def trained(
    place: Path, environment: Mapping[str, str] | None = None, **fields: Any
) -> tuple[dict[str, Any], str]:
    """As `trained_alone`, by the launch line of several devices."""
    words = shlex.split(script(place, **fields).launch.replace("LR", "1e-3"))
    words[words.index("train.py") :] = [str(DRIVE), *arguments(place)]
    if environment:  # one batch, made before the steps, as the ledger has it
        words[words.index("data")] = "--synthetic"
    given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(environment or {})}
    code, output = follow(words, place, given)
    assert code == 0, output[-6000:]
    kept = {} if environment else torch.load(place / "out" / "last.pt")  # none of random images
    return kept, output


TWO = {"world_size": 2, "batch_size": 2, "accumulate": 2}
ONE = {"batch_size": 4, "accumulate": 2}
PARALLEL: list[Any] = [
    {"parallelism": "ddp", "ddp_bucket_view": True, "ddp_broadcast_buffers": False},
    {"parallelism": "fsdp", "clip_grad": True},
    *(
        pytest.param(fields, marks=pytest.mark.release)
        for fields in (
            {"parallelism": "ddp", "gradient_sync": "every", "ddp_find_unused": True},
            {"parallelism": "ddp", "ddp_bucket_mb": 1, "ddp_compression": "fp16"},
            {"parallelism": "ddp", "ddp_static_graph": True, "gradient_sync": "every"},
            {"parallelism": "fsdp", "fsdp_reshard": False, "gradient_sync": "every", "ema": True},
            {"parallelism": "fsdp", "checkpointing": "blocks", "optimizer": "sgd"},
            {"parallelism": "none"},
            {"parallelism": "hsdp", "world_size": 4, "batch_size": 1, "fsdp_shard_size": 2},
        )
    ),
]


@pytest.mark.parametrize("fields", PARALLEL, ids=str)
@pytest.mark.trainers
def test_two_ranks_train_as_one(fields: dict[str, Any], tmp_path: Path) -> None:
    """The same 16 images, in the same global batches: the same weights, up to the order of sums."""
    plain = {k: v for k, v in fields.items() if k in ("clip_grad", "ema", "optimizer")}
    alone, said = trained_alone(tmp_path / "alone", **ONE, **plain)
    several, output = trained(tmp_path / "several", **{**TWO, **fields})
    assert output.count(f"step {STEPS}/{STEPS}  epoch") == 1, "one log, rank 0's"
    near = 2e-3 if "ddp_compression" in fields else 2e-5  # gradients that cross in 16 bits
    assert losses(output) == pytest.approx(losses(said), abs=10 * near)
    assert list(alone["model"]) == list(several["model"])
    for name, weight in alone["model"].items():
        torch.testing.assert_close(several["model"][name], weight, rtol=0, atol=near)
    for name, weight in alone.get("ema", {}).items():
        torch.testing.assert_close(several["ema"][name], weight, rtol=0, atol=2e-5)


def losses(output: str) -> list[float]:
    found = [float(loss) for loss in re.findall(r"^step .*  loss (\S+)", output, re.MULTILINE)]
    assert len(found) == STEPS
    return found


def ledger_peak(**fields: Any) -> int:
    """The most that the second step of a rank's ledger holds above what it begins with."""
    model = tiny("native")
    setting = TrainSetting(**{**PLAIN, **fields})
    model_, resolved = resolve(model, setting)
    spec = find_library("native")
    ledger = record_training(spec.on_shapes(model_, resolved), model_, resolved)
    sizes: dict[int, int] = {}
    live = start = highest = 0
    for event in ledger.events:
        if isinstance(event, Allocated):
            sizes[event.storage] = event.num_bytes
            live += event.num_bytes
        elif isinstance(event, Freed):
            live -= sizes.pop(event.storage, 0)  # a kernel's scratch is CUDA's alone
        elif isinstance(event, Marked) and event.step == 0:
            start = highest = live
        highest = max(highest, live)
    return highest - start


@pytest.mark.release
@pytest.mark.parametrize("parallelism", ["ddp", "fsdp"])
def test_a_rank_takes_what_the_ledger_says(parallelism: str, tmp_path: Path) -> None:
    fields = {"world_size": 2, "batch_size": 4, "parallelism": parallelism}
    expected, peaks = ledger_peak(**fields), list[int]()
    # What gloo's threads let go may be late, and never early: on a busy machine in every step.
    while len(peaks) < 6 and expected not in peaks:
        trained(tmp_path / "run", environment={"DRIVE_MEMORY": str(tmp_path / "peak")}, **fields)
        peaks += [int((tmp_path / f"peak.{rank}").read_text()) for rank in (0, 1)]
    assert min(peaks) == expected, (peaks, expected)
