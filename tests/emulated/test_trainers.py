"""What is emitted for a GPU, trained for two steps by each trainer on an emulated one.

Lightning and Accelerate over several ranks send objects by NCCL, and the emulated one moves no
bytes: those are run on the CPU (`tests/trainers/running/`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planner.machine.emulated import EmulatedMachine, started
from tests.emulated.conftest import RTX_3090, RTX_4090
from tests.trainers.cases import tiny
from tests.trainers.running import test_running as running
from tests.trainers.running.harness import Case, differences, make_pictures, train

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(400)]

ASKED: dict[str, Any] = {"precision": "bf16", "attention": "sdpa", "optimizer": "adamw-fused"}

ON_HOST = {
    "offload_optimizer": "state-and-gradients", "accumulate": 1, "batch_size": 8,
    "validation_batch_size": 4,
}  # fmt: skip
FP8 = {"precision": "fp8", "batch_size": 16, "validation_batch_size": 4}


@pytest.mark.parametrize(
    ("target", "library", "more"),
    [
        ("pytorch", "native", {"checkpointing": "blocks", "clip_grad": True}),
        ("pytorch", "native", ON_HOST),
        # All weights in one group: ZeRO steps each group by itself.
        ("deepspeed", "native", {**ON_HOST, "optimizer": "adam-fused"}),
        ("deepspeed", "native", {**ON_HOST, "optimizer": "adam", "offload_optimizer": "state"}),
        ("pytorch", "native", {"world_size": 2, "parallelism": "ddp"}),
        ("pytorch", "native", {"world_size": 2, "parallelism": "fsdp"}),
        ("transformers", "transformers", {}),
        ("lightning", "native", {}),
        ("accelerate", "native", {}),
        *(
            pytest.param(target, library, FP8, marks=pytest.mark.release)
            for target, library in (
                ("transformers", "transformers"),
                ("lightning", "native"),
                ("accelerate", "native"),
            )
        ),
    ],
)
def test_a_trainer_trains_as_on_a_gpu(
    libraries: Path,
    tmp_path: Path,
    target: str,
    library: str,
    more: dict[str, Any],
) -> None:
    card, device = RTX_3090, running.CUDA
    if more is FP8:
        card, device = RTX_4090, running.CUDA.model_copy(update={"name": RTX_4090.name})
    model = tiny(library, embed_dim=64 if more is FP8 else 16)  # whose layers may be converted
    case = Case(target, model, {**ASKED, **more}, device=device)
    # An epoch is two steps; of DeepSpeed's script more, which picks by a mask to validate: no
    # kernel computes one here.
    steps = 2 if target != "deepspeed" else 4
    make_pictures(tmp_path / "DATA", training=steps * case.setting.global_batch)
    with started(EmulatedMachine((card,) * case.setting.world_size)) as environment:
        trained = train if target == "pytorch" else running.trained
        run = trained(case, tmp_path, environment=environment)
    # What is kept for backward is CUDA's kernels' matter, and each rank validates a part.
    instead = {"saved_bytes": None}
    if "offload_optimizer" in more:
        instead["num_parameters"] = None  # each weight on the host has an optimizer of its own
    if case.setting.world_size > 1 or target == "deepspeed":
        instead["validation_batch"] = None
    assert differences(run, **instead) == []
