"""An emulated machine as a value: from the catalogue, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from planner.core.errors import PlannerError, UnsupportedError, UsageError
from planner.core.units import GIB
from planner.machine.emulated import EmulatedMachine, building, emulated_gpu
from planner.machine.emulated.building import built_libraries, find_wheels
from planner.machine.emulated.machine import configuration_text
from planner.machine.hardware import all_gpus


def test_every_gpu_of_nvidia_in_the_catalogue_can_be_emulated() -> None:
    for gpu in all_gpus():
        if gpu.vendor == "NVIDIA":
            emulated = emulated_gpu(gpu)
            assert emulated.num_sms == gpu.num_sms
            assert emulated.memory_bytes <= gpu.memory_bytes
            assert configuration_text(EmulatedMachine((emulated,)), "t")


def test_what_cannot_be_emulated_says_why() -> None:
    with pytest.raises(UnsupportedError, match="only NVIDIA's"):
        emulated_gpu("mi300x")
    with pytest.raises(UsageError, match="no 'memory'"):
        emulated_gpu("rtx-3090", memory=GIB)
    with pytest.raises(UsageError, match="num_sms is not"):
        emulated_gpu("rtx-3090", num_sms=-1)
    with pytest.raises(UsageError, match="line of text"):
        emulated_gpu("rtx-3090", name="two\nlines")
    with pytest.raises(UsageError, match="1 to 16 GPUs, and not 0"):
        EmulatedMachine(())


def test_a_torch_without_cuda_is_refused_with_the_line_that_brings_one(tmp_path: Path) -> None:
    (tmp_path / "torch-2.13.0+cpu.dist-info").mkdir()
    with pytest.raises(PlannerError, match=r"pip install --force-reinstall torch===2\.13\.0"):
        find_wheels(tmp_path)
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    (tmp_path / "torch" / "lib" / "libtorch_cuda.so").touch()
    with pytest.raises(PlannerError, match=r"lack libcudart\.so, .*nccl\.h"):
        find_wheels(tmp_path)


# The emulated libraries in the cache: built once, by whoever comes first.

BUILD = "from planner.machine.emulated.building import built_libraries; print(built_libraries())"


@pytest.mark.emulated
def test_two_processes_build_the_same_at_once(tmp_path: Path, libraries: Path) -> None:
    environment = {**os.environ, "PLANNER_CACHE_DIR": str(tmp_path)}
    pipe, root = subprocess.PIPE, Path(__file__).parents[2]
    command = [sys.executable, "-c", BUILD]
    both = [
        subprocess.Popen(command, env=environment, stdout=pipe, text=True, cwd=root)
        for _ in range(2)
    ]
    first, second = (process.communicate()[0].strip() for process in both)
    assert first == second
    assert [path.name for path in (tmp_path / "emulated").iterdir()] == [libraries.name]


@pytest.mark.emulated
def test_without_a_compiler_it_says_which_package_brings_one(
    libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANNER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(building.shutil, "which", lambda name: None)
    with pytest.raises(PlannerError, match="apt-get install gcc libc6-dev"):
        built_libraries()
