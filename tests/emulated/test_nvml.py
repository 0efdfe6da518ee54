"""The emulated management library, as our own reading of NVML hears it: no torch is needed."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from planner.core.units import GIB
from planner.machine.emulated import EmulatedMachine, holding, started
from tests.emulated.conftest import RTX_3090, Run, answer

pytestmark = pytest.mark.emulated

TELL = """
import json
from planner.machine.nvml import devices
def tell(device):
    memory, processes = device.memory, device.processes
    return {
        "name": device.name, "capability": device.capability, "uuid": device.uuid,
        "total": memory and memory.total, "used": memory and memory.used,
        "held": None if processes is None else [process.used_bytes for process in processes],
        "busy": device.utilization and device.utilization.gpu_percent, "mhz": device.sm_max_mhz,
    }
print(json.dumps([device and tell(device) for device in devices()]))
"""


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
