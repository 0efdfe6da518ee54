"""`planner estimate --gpus`: rows of many GPUs, their table, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cli.test_estimate import invoke, run, tiny

__all__ = ["tiny"]

A100 = ("--gpu", "a100-sxm-80gb")


def rows(*arguments: str) -> list[dict[str, Any]]:
    found = json.loads(invoke(*arguments, "--json").stdout)
    return found if isinstance(found, list) else [found]


def test_several_gpus_without_a_parallelism_run_ddp_and_it_is_said(tiny: str) -> None:
    found = rows(tiny, *A100, "--gpus", "1,2,8")
    assert [(f["setting"]["world_size"], f["setting"]["parallelism"]) for f in found] == [
        (1, "none"), (2, "ddp"), (8, "ddp"),
    ]  # fmt: skip
    text = invoke(tiny, *A100, "--gpus", "1,2,8").stdout
    assert "\nSeveral GPUs without --parallelism run ddp.\n" in text
    assert "run ddp" not in invoke(tiny, *A100, "--gpus", "2", "--parallelism", "ddp").stdout


def test_a_global_batch_is_split_over_gpus_and_micro_batches(tiny: str) -> None:
    found = rows(tiny, *A100, "--gpus", "1,2,4", "--global-batch", "64", "--accumulate", "2")
    assert [f["setting"]["batch_size"] for f in found] == [32, 16, 8]
    assert {f["scaling"]["global_batch"] for f in found} == {64}


def test_the_learning_rate_follows_the_global_batch_by_two_rules(tiny: str) -> None:
    """Swin's own: 5e-4 for 512 images."""
    found = rows(tiny, *A100, "--gpus", "1,4", "--batch-size", "128")
    assert [f["scaling"]["learning_rate"]["linear"] for f in found] == [1.25e-4, 5e-4]
    assert found[0]["scaling"]["learning_rate"]["square_root"] == 2.5e-4
    without = rows(tiny, "--gpus", "4", "--optimizer", "sgd")[0]
    assert without["scaling"]["learning_rate"] == {"linear": None, "square_root": None}


@pytest.mark.parametrize(
    ("arguments", "law", "way_out"),
    [
        (("--gpus", "3", "--global-batch", "64"), "a global batch of 64 cannot be split into 3",
         "Choose a multiple of 3."),
        (("--link", "pcie4"), "--link pcie4 joins several GPUs, and there is one",
         "Say how many with --gpus."),
        (("--gpus", "2", "--link", "pcie6"), "unknown link 'pcie6'. Did you mean 'pcie", "no-p2p"),
        (("--gpus", "4", "--link", "nvlink-bridge-h100"), "joins at most 2 GPUs in a machine",
         "--nodes 2"),
        (("--gpus", "4", "--nodes", "3"), "cannot be split over 3 nodes: choose a multiple", ""),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_the_way_out(
    tiny: str,
    arguments: tuple[str, ...],
    law: str,
    way_out: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status, out, err = run(capsys, monkeypatch, "estimate", tiny, *A100, *arguments)
    assert status == 2
    assert not out
    assert law in err
    assert way_out in err
