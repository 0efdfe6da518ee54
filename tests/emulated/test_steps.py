"""Steps that no record holds beside torch's own CUDA code: they take what is predicted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from planner.estimation.estimate import estimate
from planner.machine.emulated import EmulatedMachine, emulated_gpu, started
from planner.machine.hardware import find_gpu
from search.loop.study.records import read_records

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.emulated, pytest.mark.timeout(400), pytest.mark.usefixtures("libraries")]

GPU = "h100-sxm-80gb"
STEPS = {
    "groups": [
        {"name": str(setting), "models": [model], "measure_seconds": 0.05, "setting": setting}
        for model, setting in (
            # At batch 1 the weights are most of it.
            ("native:swin_tiny", {
                "batch_size": 1, "optimizer": "adamw-fused",
                "offload_optimizer": "state-and-gradients",
            }),
            ("timm:swin_tiny_patch4_window7_224", {
                "batch_size": 2, "precision": "fp32", "offload_optimizer": "state",
                "checkpointing": "blocks", "accumulate": 2, "optimizer": "sgd",
            }),
            ("native:swin_tiny", {"batch_size": 16, "precision": "fp8", "attention": "eager"}),
            ("torchvision:swin_v2_t", {
                "batch_size": 4, "precision": "fp32", "checkpointing": "selective",
            }),
        )
    ]
}  # fmt: skip


def test_a_probe_takes_what_is_predicted(tmp_path: Path) -> None:
    (tmp_path / "steps.yaml").write_text(json.dumps(STEPS))
    order = ("steps.yaml", "--device", "cuda:0", "--record", "r.jsonl")
    with started(EmulatedMachine((emulated_gpu(GPU),))) as environment:
        subprocess.run(
            [sys.executable, "-m", "tests.truth.record", *order], cwd=tmp_path, check=True,
            env={**environment, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    records = read_records(tmp_path / "r.jsonl").records
    assert len(records) == len(STEPS["groups"])
    for record in records:
        found = estimate(record.model, record.setting, gpu=find_gpu(GPU))
        assert record.peak_reserved_bytes == found.peak_reserved_bytes
        assert record.peak_allocated_bytes == pytest.approx(found.peak_allocated_bytes, rel=1e-4)
