"""What is emitted for a GPU, trained for two steps by each trainer on an emulated one.

Lightning and Accelerate over several ranks send objects by NCCL, and the emulated one moves no
bytes: those are run on the CPU (`tests/trainers/running/`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planner.machine.emulated import EmulatedMachine, started
from tests.emulated.conftest import RTX_3090
from tests.trainers.cases import tiny
from tests.trainers.running import test_running as running
from tests.trainers.running.harness import Case, differences, make_pictures, train

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(400)]

ASKED: dict[str, Any] = {"precision": "bf16", "attention": "sdpa", "optimizer": "adamw-fused"}

ON_HOST = {
    "offload_optimizer": "state-and-gradients", "accumulate": 1, "batch_size": 8,
    "validation_batch_size": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("target", "library", "more"),
    [
        # All weights in one group: ZeRO steps each group by itself.
        ("deepspeed", "native", {**ON_HOST, "optimizer": "adam-fused"}),
        ("pytorch", "native", {"world_size": 2, "parallelism": "fsdp"}),
        ("transformers", "transformers", {}),
    ],
)
def test_a_trainer_trains_as_on_a_gpu(
    libraries: Path, tmp_path: Path, target: str, library: str, more: dict[str, Any]
) -> None:
    case = Case(target, tiny(library, embed_dim=16), {**ASKED, **more}, device=running.CUDA)
    # An epoch is two steps; of DeepSpeed's script more, which picks by a mask to validate: no
    # kernel computes one here.
    steps = 2 if target != "deepspeed" else 4
    make_pictures(tmp_path / "DATA", training=steps * case.setting.global_batch)
    with started(EmulatedMachine((RTX_3090,) * case.setting.world_size)) as environment:
        trained = train if target == "pytorch" else running.trained
        run = trained(case, tmp_path, environment=environment)
    # What is kept for backward is CUDA's kernels' matter, and each rank validates a part.
    instead = {"saved_bytes": None}
    if "offload_optimizer" in more:
        instead["num_parameters"] = None  # each weight on the host has an optimizer of its own
    if case.setting.world_size > 1 or target == "deepspeed":
        instead["validation_batch"] = None
    assert differences(run, **instead) == []
