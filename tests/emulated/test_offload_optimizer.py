"""An optimizer on the host beside torch's own CUDA code: torchao's takes what is predicted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from planner.estimation.estimate import estimate
from planner.machine.emulated import EmulatedMachine, started
from planner.machine.hardware import find_gpu
from search.loop.study.records import read_records
from tests.emulated.conftest import RTX_3090

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.emulated, pytest.mark.timeout(400), pytest.mark.usefixtures("libraries")]

STEPS = {
    "groups": [
        {
            "name": "on the host",
            "models": ["native:swin_tiny"],
            "setting": {"batch_size": 1, "optimizer": "adamw-fused"},
            "measure_seconds": 0.05,
            "grid": {"offload_optimizer": ["state-and-gradients"]},
        },
        {
            "name": "over micro-batches",
            "models": ["timm:swin_tiny_patch4_window7_224"],
            "setting": {
                "batch_size": 2, "precision": "fp32", "offload_optimizer": "state",
                "checkpointing": "blocks", "accumulate": 2, "optimizer": "sgd",
            },
            "measure_seconds": 0.05,
        },
    ]
}  # fmt: skip


def test_a_probe_takes_what_is_predicted(tmp_path: Path) -> None:
    """At batch 1 the weights are most of it."""
    (tmp_path / "steps.yaml").write_text(json.dumps(STEPS))
    order = ("steps.yaml", "--device", "cuda:0", "--record", "r.jsonl")
    with started(EmulatedMachine((RTX_3090,))) as environment:
        subprocess.run(
            [sys.executable, "-m", "tests.truth.record", *order], cwd=tmp_path, check=True,
            env={**environment, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    records = read_records(tmp_path / "r.jsonl").records
    assert len(records) == 2
    for record in records:
        found = estimate(record.model, record.setting, gpu=find_gpu("rtx-3090"))
        assert record.peak_reserved_bytes == found.peak_reserved_bytes
        assert record.peak_allocated_bytes == pytest.approx(found.peak_allocated_bytes, rel=1e-4)
