"""What is emitted for a GPU, trained by its launch line on an emulated one.

Lightning and accelerate over several ranks send objects by NCCL, and the emulated one moves no
bytes: those are run on the CPU (`tests/trainers/test_running.py`).
"""

import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from planner.core.schema import DeviceInfo, TrainSetting
from planner.machine.emulated import EmulatedMachine, started
from planner.trainers.emission import emit_setting
from tests.emulated.conftest import RTX_3090
from tests.trainers.cases import GIB, follow, make_pictures, tiny

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(400)]
CUDA = DeviceInfo(kind="cuda", name="NVIDIA GeForce RTX 3090", total_bytes=24 * GIB)


@pytest.mark.parametrize(
    ("target", "more"),
    [
        ("pytorch", {"world_size": 2, "parallelism": "fsdp", "checkpointing": "blocks"}),
        ("pytorch", {"offload": "activations", "ema": True}),
        ("accelerate", {"attention": "sdpa"}),
        ("transformers", {}),
        ("deepspeed", {"parallelism": "zero1", "optimizer": "adam-fused"}),
    ],
    ids=str,
)
def test_a_trainer_trains_as_on_a_gpu(
    libraries: Path, tmp_path: Path, target: str, more: dict[str, Any]
) -> None:
    if target != "pytorch" and find_spec(target) is None:
        pytest.skip(f"{target} is not installed")
    setting = TrainSetting(**{"batch_size": 4, "optimizer": "adamw-fused", **more})
    emitted = emit_setting(tiny(num_classes=2), setting, target, device=CUDA)
    emitted.write(tmp_path)
    make_pictures(tmp_path / "DATA", training=8 * setting.world_size)
    words = shlex.split(f"{emitted.launch} --epochs 1 --warmup-epochs 1 --workers 0")
    folder = Path(sys.executable).parent
    words[0] = str(folder / words[0])
    with started(EmulatedMachine((RTX_3090,) * setting.world_size)) as environment:
        own = {**os.environ, **environment, "PATH": f"{folder}:{os.environ['PATH']}"}
        code, output = follow(words, tmp_path, own)
    assert code == 0, output[-3000:]
    assert any(tmp_path.joinpath("output").iterdir())
