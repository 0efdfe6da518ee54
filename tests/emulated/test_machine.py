"""An emulated machine as a value: from the catalogue, and what it refuses."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from planner.core.errors import PlannerError, UnsupportedError, UsageError
from planner.core.units import GIB
from planner.machine.emulated import EmulatedMachine, build, emulated_gpu, holding, started
from planner.machine.emulated.build import built_libraries, find_wheels
from planner.machine.emulated.machine import configuration_text
from planner.machine.hardware import all_gpus
from tests.emulated.conftest import RTX_3090, Run, answer


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
    with pytest.raises(UsageError, match="below 0: num_sms"):
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

BUILD = "from planner.machine.emulated.build import built_libraries; print(built_libraries())"


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
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(PlannerError, match="apt-get install gcc libc6-dev"):
        built_libraries()


# The emulated management library, as our own reading of NVML hears it: no torch is needed.

TELL = """
import json
from planner.machine.nvml import devices
def tell(device):
    memory, processes = device.memory, device.processes
    return {
        "name": device.name, "capability": device.capability, "uuid": device.uuid,
        "total": memory and memory.total, "used": memory and memory.used,
        "held": None if processes is None else [process.used_bytes for process in processes],
        "busy": device.utilization and device.utilization.gpu, "mhz": device.sm_max_mhz,
    }
print(json.dumps([device and tell(device) for device in devices()]))
"""


@pytest.mark.emulated
def test_it_tells_what_the_machine_has_and_who_holds_it(libraries: Path) -> None:
    with started(EmulatedMachine((RTX_3090, RTX_3090))) as environment:
        with holding(environment, GIB, device=1):
            idle, busy = answer(environment, TELL, CUDA_VISIBLE_DEVICES="0")
        assert answer(environment, TELL)[1]["held"] == []
    assert idle["name"] == "NVIDIA GeForce RTX 3090"
    assert idle["capability"] == [8, 6]
    assert idle["total"] == RTX_3090.memory_bytes
    assert (idle["used"], idle["held"], idle["busy"]) == (0, [], 0)
    assert busy["used"] == GIB + RTX_3090.context_bytes
    assert busy["held"] == [busy["used"]]
    assert busy["busy"] > 0
    assert idle["uuid"] != busy["uuid"]


@pytest.mark.emulated
def test_a_slice_has_no_utilisation_and_a_lost_card_no_answer(run: Run) -> None:
    part = dataclasses.replace(RTX_3090, is_slice=True)
    assert run(TELL, EmulatedMachine((part,)))[0]["busy"] is None
    lost = dataclasses.replace(RTX_3090, lost_after=1)
    program = f"""
import torch
try:
    torch.ones(1, device="cuda").mul_(2)
except RuntimeError:
    pass
{TELL}"""
    assert run(program, EmulatedMachine((lost,))) == [None]


@pytest.mark.emulated
def test_the_doctor_judges_it_as_any_machine(libraries: Path) -> None:
    """Nothing is wrong with its cards and its torch, but for what another holds."""
    command = (sys.executable, "-P", "-m", "planner", "doctor", "--json")
    machine = EmulatedMachine((RTX_3090, RTX_3090))
    with started(machine) as environment, holding(environment, 4 * GIB, device=1):
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    found = json.loads(done.stdout)
    of_host = ("host.", "settings.", "container.")
    named = [f for f in found["findings"] if not f["name"].startswith(of_host)]
    assert [f["name"] for f in named] == ["card.busy"], done.stderr
    assert named[0]["subject"] == "cuda:1 (NVIDIA GeForce RTX 3090)"
    assert [gpu["error"] for gpu in found["machine"]["torch"]["gpus"]] == ["", ""]
