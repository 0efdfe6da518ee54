"""One rank of several as torch runs it, beside its closed form and beside real ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planner.core.schema import TrainSetting
from planner.estimation.estimate import estimate_ledger, resolve
from planner.estimation.ledgers import step_ledger
from planner.ledger.ledger import Ledger, Sent
from planner.machine.emulated import EmulatedMachine, emulated_gpu, started
from planner.recording.recordings import DEFAULT_CARD, Recorder
from tests.equality import torch_peaks
from tests.recording.test_replay import DDP, FSDP, SWIN

ROOT = Path(__file__).parents[2]
HSDP = {**FSDP, "parallelism": "hsdp", "nodes": 2}


def crossed(ledger: Ledger) -> dict[str, int]:
    """What a rank sends and receives in the second step, by collective. Buffers,
    which the first rank sends to the others, are left out, and norms of all gradients."""
    sent = {e.event.handle: e.event for e in ledger.exchanges() if isinstance(e.event, Sent)}
    found: dict[str, int] = {}
    for event in sent.values():
        if event.collective != "broadcast" and event.num_bytes > 1024:
            found[event.collective] = found.get(event.collective, 0) + event.num_bytes
    return found


@pytest.mark.parametrize(
    "changes",
    [
        DDP, {**DDP, "accumulate": 2}, {**DDP, "clip_grad": False},
        FSDP,
        {**FSDP, "accumulate": 2, "gradient_sync": "every"}, {**HSDP, "precision": "fp32"},
    ],
    ids=str,
)  # fmt: skip
def test_closed_forms_are_beside_what_one_rank_does(
    recorder: Recorder, changes: dict[str, Any]
) -> None:
    """Bytes that are alive, that torch reserves and that cross; and how they are uncertain."""
    resolved, setting = resolve(SWIN, TrainSetting(batch_size=4, **changes))
    ledger, torch_ledger = step_ledger(resolved, setting), recorder.record(resolved, setting)
    closed, own = (estimate_ledger(resolved, setting, one) for one in (ledger, torch_ledger))
    off = 0.015 if setting.parallelism == "ddp" else 0.001
    off += 0.006 * (setting.gradient_sync == "every")  # whole gradients of a later micro-batch
    assert closed.peak_allocated_bytes == pytest.approx(own.peak_allocated_bytes, rel=off)
    assert closed.low_bytes <= own.device_total_bytes <= closed.high_bytes
    assert crossed(ledger) == pytest.approx(crossed(torch_ledger), rel=1e-3)


RANK = """
import json, os, sys, time, torch
from pydantic import TypeAdapter
from planner.core.schema import Model, TrainSetting
from planner.recording.step import steps_until_steady
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
@pytest.mark.parametrize("changes", [DDP, {**FSDP, "world_size": 2}], ids=str)
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
    assert tuple(real) == torch_peaks(recorder, resolved, setting)
