"""The commands as a user runs them, on emulated GPUs: what they find and what they say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from planner import emit
from planner.core.units import GIB, MIB
from planner.machine.emulated import EmulatedMachine, emulated_gpu, holding, started
from search.loop.study.records import read_records
from tests.emulated.conftest import ROOT, RTX_3090, answer
from tests.search.processes import VARIABLE, carrying, remaining

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(600), pytest.mark.usefixtures("libraries")]

# A Swin of few blocks: what is looked at does not depend on how many there are.
MODEL = ("native:swin_tiny", "--set", "depths=1,1,1,1")
EAGER = ("--compile", "off", "--checkpointing", "none", "--attention", "sdpa")
EMULATED = "an emulated GPU: its memory is torch's own, its times are predicted and not measured"
FREE = "import json, torch; print(json.dumps(torch.cuda.mem_get_info(0)))"


def start(environment: Mapping[str, str], folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "planner", *arguments],
        env={**environment, "PYTHONPATH": str(ROOT), "PLANNER_CACHE_DIR": str(folder / "cache")},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(environment: Mapping[str, str], folder: Path, *arguments: str, status: int = 0) -> str:
    """What a command prints."""
    process = start(environment, folder, *arguments)
    said, _ = process.communicate(timeout=500)
    assert process.returncode == status, said[-4000:]
    return said


def tune(
    machine: EmulatedMachine, folder: Path, *arguments: str, held: int = 0,
    model: tuple[str, ...] = MODEL,
) -> tuple[str, dict[str, Any]]:  # fmt: skip
    """What a search prints, and the recommendation that it leaves."""
    order = ("tune", *model, "--output", "run", "--quiet", *arguments)
    with started(machine) as environment:
        if held:
            with holding(environment, held):
                said = run(environment, folder, *order)
        else:
            said = run(environment, folder, *order)
    return said, json.loads((folder / "run" / "recommendation.json").read_text())


def test_a_card_without_bfloat16(tmp_path: Path) -> None:
    machine = EmulatedMachine((emulated_gpu("t4"),))
    said, found = tune(machine, tmp_path, *EAGER, "--batch-size", "32,64", "--trials", "3")
    assert "on an emulated Tesla T4 (memory measured, times predicted):" in said
    assert found["setting"]["precision"] == "fp16"
    assert found["evidence"]["flags"] == [EMULATED]
    assert found["device"]["emulated"]


LEFT = """
import torch
from torch import nn

class Left:
    def module(self):
        return nn.Linear(3, 3)

    def batch(self, size, device):
        return torch.randn(size, 3, device=device)

    def loss(self, module, batch):
        return (module(batch) * torch.ones(3)).sum()
"""


def test_a_tensor_that_a_task_leaves_on_the_cpu_is_found(tmp_path: Path) -> None:
    """Which no trace sees (docs/your-own-model.md)."""
    (tmp_path / "left.py").write_text(LEFT)
    order = ("left:Left", "--batch-size", "2")
    with started(EmulatedMachine((emulated_gpu("rtx-3090"),))) as environment:
        assert "Fits" in run(environment, tmp_path, "estimate", *order, "--gpu", "rtx-3090")
        said = run(environment, tmp_path, "tune", *order, "--trials", "1", status=1)
    assert "Expected all tensors to be on the same device" in said
    assert "left.py:13" in said


def test_a_compiled_setting(tmp_path: Path) -> None:
    one_block = ("native:swin_tiny", "--set", "depths=1", "--set", "num_heads=3")
    asked = ("--compile", "default", "--batch-size", "32", "--precision", "bf16", "--trials", "1")
    more = ("--budget", "8m")
    _, found = tune(EmulatedMachine((RTX_3090,)), tmp_path, *asked, *more, model=one_block)
    assert found["setting"]["compile"] == "default"
    assert found["evidence"]["compile_seconds"] > 0


def test_a_search_at_the_end_of_memory(tmp_path: Path) -> None:
    """Beside batches that run in 2 GiB others are out of memory, and the search goes on."""
    small = emulated_gpu("rtx-3090", memory_bytes=2 * GIB, context_bytes=256 * MIB)
    asked = ("--precision", "bf16", "--headroom", "0%", "--strategy", "exhaustive")
    sizes = ("--batch-size", "32,48,64,96", "--optimizer", "adamw", "--no-baseline")
    _, found = tune(EmulatedMachine((small,)), tmp_path, *EAGER, *asked, *sizes)
    records = read_records(tmp_path / "run" / "probes.jsonl").records
    ends = {r.setting.batch_size: r.status for r in records}
    assert set(ends.values()) == {"measured", "out_of_memory"}, ends
    measured = [size for size, end in ends.items() if end == "measured"]
    assert max(measured) < min(size for size in ends if size not in measured)
    assert found["setting"]["batch_size"] in measured


def test_the_allocator_is_tried_both_ways(tmp_path: Path) -> None:
    """Probes run with expandable segments, which take less; the winner once without them."""
    asked = ("--batch-size", "64", "--precision", "bf16", "--optimizer", "adamw", "--no-baseline")
    said, found = tune(EmulatedMachine((RTX_3090,)), tmp_path, *EAGER, *asked)
    (ours,) = read_records(tmp_path / "run" / "probes.jsonl").records
    (plain,) = read_records(tmp_path / "run" / "allocator.jsonl").records
    ran_with = [r.versions["allocator_config"] for r in (ours, plain)]
    assert ran_with == ["expandable_segments:True", "expandable_segments:False"]
    assert (ours.peak_reserved_bytes or 0) < (plain.peak_reserved_bytes or 0)
    assert "not faster beyond noise, and they are kept" in said
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in emit(found, "timm").launch


def test_a_card_without_virtual_memory_is_tuned_without_expandable_segments(tmp_path: Path) -> None:
    virtual = emulated_gpu("rtx-3090", lacks_virtual_memory=True)
    asked = ("--batch-size", "64", "--precision", "bf16", "--optimizer", "adamw", "--no-baseline")
    said, found = tune(EmulatedMachine((virtual,)), tmp_path, *EAGER, *asked, "--memory", "12GiB")
    why = "which fail on this device: CUDA driver error: operation not supported."
    assert f"Probes run without expandable segments, {why}" in said
    assert found["evidence"]["status"] == "measured"
    assert "allocator_config" not in found["evidence"]["versions"]
    assert any("was held to 11." in flag for flag in found["evidence"]["flags"]), "by torch itself"


def test_what_another_process_holds_is_left_to_it(tmp_path: Path) -> None:
    asked = ("--batch-size", "64", "--precision", "bf16", "--trials", "1")
    said, found = tune(
        EmulatedMachine((RTX_3090,)), tmp_path, *EAGER, *asked, held=RTX_3090.memory_bytes // 2
    )
    assert "Other processes hold 12.22 GiB of 23.56 GiB: 11.34 GiB are left." in said
    assert found["evidence"]["flags"] == [EMULATED, "other processes on the GPU hold 12.22 GiB"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_cards(tmp_path: Path, kind: str) -> None:
    asked = ("--gpus", "2", "--parallelism", kind, "--batch-size", "32", "--precision", "bf16")
    more = (*EAGER, "--trials", "1", "--no-baseline")
    said, found = tune(EmulatedMachine((RTX_3090,) * 2), tmp_path, *asked, *more)
    assert "images/s of all 2 devices" in said
    assert found["evidence"]["flags"] == [EMULATED]
    assert found["evidence"]["world"]["world_size"] == 2


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        ({"illegal_access_after": 2000}, "No probe ended well (2 crashed)."),
        ({"lost_after": 2000}, "the search ended because the device does not answer any more."),
    ],
)
def test_a_device_that_fails_is_a_crash_and_no_lack_of_memory(
    tmp_path: Path, fails: dict[str, int], words: str
) -> None:
    asked = ("--batch-size", "16", "--precision", "bf16", "--trials", "4", "--no-baseline")
    with started(EmulatedMachine((emulated_gpu("rtx-3090", **fails),))) as environment:
        order = ("tune", *MODEL, *EAGER, *asked, "--output", "run", "--quiet")
        said = run(environment, tmp_path, *order, status=1)
    records = read_records(tmp_path / "run" / "probes.jsonl").records
    assert {r.status for r in records} == {"crashed"}
    assert words in said
    assert "Nothing fits" not in said


def test_a_card_that_torch_has_no_code_for_is_named(tmp_path: Path) -> None:
    old = emulated_gpu("v100-sxm-16gb", name="Tesla K80", capability=(3, 7))
    with started(EmulatedMachine((old,))) as environment:
        order = ("tune", *MODEL, "--device", "cuda:0", "--output", "run")
        said = run(environment, tmp_path, *order, status=2)
    assert "has no code for Tesla K80 of compute capability 3.7" in said


def test_the_first_minutes_on_a_device() -> None:
    chosen = "driver", "sdpa-backward-memory", "limit-eager", "context", "lora-attention"
    program = """if True:
        import json, sys
        from tests.truth.first import look
        print(json.dumps({name: look(name) for name in sys.argv[1:]}))
    """
    with started(EmulatedMachine((RTX_3090,))) as environment:
        seen = answer(environment, program, *chosen)
    assert {n: r["message"] for n, r in seen.items() if r["status"] != "seen"} == {}
    figures = {name: record["figures"] for name, record in seen.items()}
    assert figures["sdpa-backward-memory"]["workspace_is_as_expected"]
    assert figures["limit-eager"]["classified_as"][0] == "out_of_memory"
    assert figures["lora-attention"]["num_kernels"] == 0  # CUPTI is not emulated


@pytest.mark.parametrize("whom", ["a worker", "the tuner"])
def test_who_is_killed_leaves_nothing_and_the_same_command_goes_on(
    tmp_path: Path, whom: str
) -> None:
    """Killed while a probe holds the card's memory."""
    # Probes are short: one of several is met while it holds memory.
    order = ("tune", *MODEL, *EAGER, "--batch-size", "16,24,32,40,48,56", "--precision", "bf16",
             "--output", "run", "--trials", "6", "--no-baseline", "--quiet")  # fmt: skip
    with started(EmulatedMachine((RTX_3090,))) as environment:
        marked = {**environment, VARIABLE: f"emulated-{os.getpid()}-{whom}"}
        process = start(marked, tmp_path, *order)
        while answer(environment, FREE)[0] >= RTX_3090.memory_bytes - 2 * RTX_3090.context_bytes:
            assert process.poll() is None
        if whom == "the tuner":
            process.kill()
        else:
            holders = sorted(carrying(marked[VARIABLE]))
            os.kill(holders[-1], signal.SIGKILL)
        process.communicate(timeout=300)
        assert not remaining(marked[VARIABLE])
        free, total = answer(environment, FREE)
        assert free == total - RTX_3090.context_bytes
        run(environment, tmp_path, *order)
    records = read_records(tmp_path / "run" / "probes.jsonl").records
    assert "measured" in {r.status for r in records}
