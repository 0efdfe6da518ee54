"""An optimizer on the host beside torch's own CUDA code: torchao's as predicted, DeepSpeed's within
what an emitted file says of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from planner.core.schema import TrainSetting
from planner.core.units import parse_bytes
from planner.estimation.estimate import estimate
from planner.libraries.resolve import resolve_model
from planner.machine.emulated import EmulatedMachine, started
from planner.machine.hardware import find_gpu
from planner.trainers.emission import emit_setting
from search.loop.study.records import read_records
from tests.emulated.conftest import ROOT, RTX_3090
from tests.emulated.test_commands import run as command
from tests.trainers.cases import FakeEstimator

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
    order = ("validate", "--device", "cuda:0", "--matrix", "steps.yaml", "--record", "r.jsonl")
    with started(EmulatedMachine((RTX_3090,))) as environment:
        command(environment, tmp_path, *order)
    records = read_records(tmp_path / "r.jsonl").records
    assert len(records) == 2
    for record in records:
        found = estimate(record.model, record.setting, gpu=find_gpu("rtx-3090"))
        assert record.peak_reserved_bytes == found.peak_reserved_bytes
        assert record.peak_allocated_bytes == pytest.approx(found.peak_allocated_bytes, rel=1e-4)


ENGINE = """
import json, os, torch
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": "29517"}
import deepspeed
from building import *
deepspeed.init_distributed()
model = MODEL.to("cuda")
optimizer = build_optimizer(model, 1e-3)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config="ds_config.json")
images = torch.randn(1, 3, 224, 224, device="cuda")
targets = torch.rand(1, 1000, device="cuda")
for step in range(3):
    loss = training_loss(engine(images), targets)
    engine.backward(loss)
    del loss
    engine.step()
    if step == 0:
        torch.cuda.reset_peak_memory_stats()
print(torch.cuda.max_memory_allocated())
"""


def test_deepspeeds_takes_no_more_than_its_file_says(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    model = resolve_model("torchvision:swin_t", {})
    setting = TrainSetting(
        batch_size=1, attention="eager", optimizer="adamw-fused",
        offload_optimizer="state-and-gradients",
    )  # fmt: skip
    found = emit_setting(model, setting, "deepspeed", estimator=FakeEstimator())
    said = re.search(r"on the device lie (\S+ \S+) of buckets besides", " ".join(found.warnings))
    built = re.search(r"model = (.*?)\.to\(", found.code)
    assert said is not None
    assert built is not None
    (tmp_path / "ds_config.json").write_text(found.text)
    (tmp_path / "building.py").write_text(found.code)
    (tmp_path / "run.py").write_text(ENGINE.replace("MODEL", built[1]))
    with started(EmulatedMachine((RTX_3090,))) as environment:
        done = subprocess.run(
            [sys.executable, "run.py"], cwd=tmp_path, capture_output=True, text=True, check=False,
            env={**environment, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    taken = int(done.stdout.splitlines()[-1])
    predicted = estimate(model, setting, gpu=find_gpu("rtx-3090")).peak_allocated_bytes
    largest = 4 * 768 * 3072
    assert predicted < taken <= predicted + parse_bytes(said[1]) + 3 * largest
