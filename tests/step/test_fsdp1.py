"""FSDP1 by the ledger of FSDP2: how far the two are apart, and the range that says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planner.errors import UnsupportedError
from planner.estimation import choose, estimate
from planner.ledger import Allocated
from planner.ledgers import affine_step, step_ledger

SWIN = "timm:swin_tiny_patch4_window7_224"
SHARDED: dict[str, Any] = {"parallelism": "fsdp", "world_size": 8, "batch_size": 4}
CASES = [
    {"model": "mlp", "world_size": 2, "autocast": False},
    {"model": "mlp", "world_size": 8, "autocast": True},
    {"model": "swin", "world_size": 8, "autocast": False},
]


@pytest.mark.trainers
def test_live_peaks_lie_within_a_unit() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.step.fsdp1_run", json.dumps(CASES)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    found = [json.loads(line.removeprefix("RESULT")) for line in lines]
    assert len(found) == 2 * len(CASES), done.stderr[-2000:]
    for one, two in zip(found[::2], found[1::2], strict=True):
        assert (one["version"], two["version"]) == (1, 2)
        assert abs(one["peak"] - two["peak"]) < one["largest"] / 4


def test_the_range_is_one_unit_below_and_two_above() -> None:
    one = estimate(SWIN, {**SHARDED, "fsdp_version": 1})
    two = estimate(SWIN, SHARDED)
    ledger = step_ledger(*choose(SWIN, SHARDED, None, {}))
    unit = max(
        event.num_bytes
        for event in ledger.events
        if isinstance(event, Allocated) and event.stream == "all_gather_copy_in"
    )
    assert one.peak_live_bytes == two.peak_live_bytes
    assert one.low_bytes == pytest.approx(two.low_bytes - unit, rel=0.01)
    assert one.high_bytes == pytest.approx(two.high_bytes + 2 * unit, rel=0.01)
    assert any("FSDP1 gives memory" in line for line in one.assumed)


def test_its_line_is_that_of_fsdp2() -> None:
    model, setting = choose(SWIN, {**SHARDED, "fsdp_version": 1}, None, {})
    line = affine_step(model, setting)
    assert line is not None
    assert line.ledger(4).events == step_ledger(model, setting).events
    assert line.ledger(4).late_bytes == step_ledger(model, setting).late_bytes > 0


def test_what_was_never_compared_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="fsdp_param_dtype bf16 is not estimated with"):
        estimate(SWIN, {**SHARDED, "fsdp_version": 1, "fsdp_param_dtype": "bf16"})
