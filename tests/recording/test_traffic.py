"""What one rank of several sends and awaits beside the step on shapes, and its bytes beside real
ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planner.core.schema import TrainSetting
from planner.estimation.estimate import resolve
from planner.estimation.ledgers import step_ledger
from planner.ledger.ledger import Ledger, Sent
from planner.machine.emulated import EmulatedMachine, emulated_gpu, started
from planner.recording.client import DEFAULT_CARD, Recorder
from tests.recording.test_replay import DDP, FSDP, SWIN

ROOT = Path(__file__).parents[2]
HSDP = {**FSDP, "parallelism": "hsdp", "fsdp_shard_size": 2}


def exchanged(ledger: Ledger) -> list[tuple[Any, ...]]:
    """Of the second step, in order: handles count from its first."""
    found, numbers = [], dict[int, int]()
    for phase, micro_batch, _, event in ledger.exchanges():
        number = numbers.setdefault(event.handle, len(numbers))
        what = event[1:6] if isinstance(event, Sent) else ("awaited",)
        found.append((phase, micro_batch, number, *what))
    return found


@pytest.mark.parametrize(
    "changes",
    [
        DDP, {**DDP, "accumulate": 2}, {**DDP, "ddp_compression": "bf16", "clip_grad": False},
        {**DDP, "ddp_find_unused": True, "ddp_bucket_mb": 1}, FSDP,
        {**FSDP, "accumulate": 2, "gradient_sync": "every"}, {**HSDP, "precision": "fp32"},
    ],
    ids=str,
)  # fmt: skip
def test_a_swin_sends_and_awaits_what_it_does_on_shapes(
    recorder: Recorder, changes: dict[str, Any]
) -> None:
    resolved = resolve(SWIN, TrainSetting(batch_size=4, **changes))
    found = exchanged(recorder.record(*resolved))
    assert found == exchanged(step_ledger(*resolved))
    assert found


RANK = """
import json, os, sys, time, torch
from pydantic import TypeAdapter
from planner.core.schema import Model, TrainSetting
from planner.step.reducer import steps_until_steady
from planner.training.building import build_training, recipe_of
from planner.training.step import Training
from planner.training.tasks.making import task_for
model = TypeAdapter(Model).validate_json(sys.argv[1])
setting = recipe_of(model, TrainSetting.model_validate_json(sys.argv[2]))
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
torch.distributed.init_process_group("nccl")
task, device = task_for(model, setting), torch.device("cuda", rank)
training = build_training(Training, task, model, setting, device)
for _ in range(steps_until_steady(setting)):
    training.step()
    torch.distributed.group.WORLD._wait_for_pending_works()  # as in steps longer than 100 ms
torch.cuda.reset_peak_memory_stats()
training.step()
peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
open(f"{sys.argv[3]}/{rank}", "w").write(json.dumps(peaks))
os._exit(0)
"""


@pytest.mark.emulated
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "changes", [{**DDP, "ddp_compression": "bf16"}, {**FSDP, "world_size": 2}], ids=str
)
def test_one_process_takes_what_the_first_of_real_ranks_does(
    recorder: Recorder, tmp_path: Path, changes: dict[str, Any]
) -> None:
    resolved, setting = resolve(SWIN, TrainSetting(batch_size=4, **changes))
    (tmp_path / "rank.py").write_text(RANK)
    order = ["--standalone", "--nproc-per-node", "2", "rank.py", resolved.model_dump_json()]
    with started(EmulatedMachine((emulated_gpu(DEFAULT_CARD),) * 2)) as environment:
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *order, setting.model_dump_json(), "."],
            cwd=tmp_path, check=True, env={**environment, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    real = json.loads((tmp_path / "0").read_text())
    assert tuple(real) == recorder.peaks(resolved, setting)[:2]
