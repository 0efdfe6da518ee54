"""An emulated machine as a value: from the catalogue, as text, and what it refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from planner.core.errors import PlannerError, UnsupportedError, UsageError
from planner.core.units import GIB, MIB
from planner.machine.emulated import EmulatedGpu, EmulatedMachine, emulated_gpu
from planner.machine.emulated.machine import configuration_text
from planner.machine.emulated.wheels import find_wheels
from planner.machine.hardware import all_gpus, find_gpu


def read_back(text: str) -> tuple[dict[str, str], list[dict[str, str]]]:
    """As source/configuration.c does: a line's first word is a key, `gpu` begins a GPU."""
    of_machine: dict[str, str] = {}
    gpus: list[dict[str, str]] = []
    for key, _, value in (line.partition(" ") for line in text.splitlines()):
        if key == "gpu":
            gpus.append({"name": value})
        else:
            (gpus[-1] if gpus else of_machine)[key] = value
    return of_machine, gpus


def test_the_text_says_all_that_is_not_the_default_of_c() -> None:
    gpu = EmulatedGpu("Some card", 8 * GIB, (8, 6), 20, 1536, context_bytes=MIB, lost_after=7)
    other = dataclasses.replace(gpu, name="Another", is_slice=True, half_flops=1.5e12)
    machine = EmulatedMachine((gpu, other), hides_processes=True, nvml_used_error=-5)
    of_machine, gpus = read_back(configuration_text(machine, "/dev/shm/t"))
    assert of_machine == {
        "table": "/dev/shm/t",
        "driver_version": str(machine.driver_version),
        "hides_processes": "1",
        "nvml_used_error": "-5",
    }
    assert [g["name"] for g in gpus] == ["Some card", "Another"]
    assert gpus[0]["memory_bytes"] == str(8 * GIB)
    assert gpus[0]["capability"] == "86"
    assert gpus[0]["lost_after"] == "7"
    assert "is_slice" not in gpus[0]
    assert gpus[1]["is_slice"] == "1"
    assert float(gpus[1]["half_flops"]) == 1.5e12


def test_every_gpu_of_nvidia_in_the_catalogue_can_be_emulated() -> None:
    for gpu in all_gpus():
        if gpu.vendor == "NVIDIA":
            emulated = emulated_gpu(gpu)
            assert emulated.num_sms == gpu.num_sms
            assert emulated.memory_bytes <= gpu.memory_bytes
            assert configuration_text(EmulatedMachine((emulated,)), "t")


@pytest.mark.parametrize(
    ("name", "threads"), [("t4", 1024), ("rtx-3090", 1536), ("h100-sxm-80gb", 2048)]
)
def test_threads_per_sm_follow_from_the_capability(name: str, threads: int) -> None:
    assert find_gpu(name).threads_per_sm == threads


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
