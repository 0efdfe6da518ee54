"""The commands as a user runs them, on emulated GPUs: what they find and what they say."""

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from planner import emit
from planner.core.units import GIB, MIB
from planner.machine.emulated import EmulatedMachine, emulated_gpu, holding, started
from search.loop.records import read_records
from tests.emulated.conftest import ROOT, RTX_3090

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(600), pytest.mark.usefixtures("libraries")]

# A Swin of few blocks: what is looked at does not depend on how many there are.
MODEL = ("native:swin_tiny", "--set", "depths=1,1,1,1")
EAGER = ("--compile", "off", "--checkpointing", "none", "--attention", "sdpa")
EMULATED = "an emulated GPU: its memory is torch's own, its times are predicted and not measured"


def run(environment: Mapping[str, str], folder: Path, *arguments: str, status: int = 0) -> str:
    """What a command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "planner", *arguments], cwd=folder, text=True, timeout=500,
        env={**environment, "PYTHONPATH": str(ROOT), "PLANNER_CACHE_DIR": str(folder / "cache")},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == status, done.stdout[-4000:]
    return done.stdout


def tune(
    machine: EmulatedMachine, folder: Path, *arguments: str, held: int = 0
) -> tuple[str, dict[str, Any]]:
    """What a search prints, and the recommendation that it leaves."""
    order = ("tune", *MODEL, "--output", "run", "--quiet", *arguments)
    with started(machine) as environment, holding(environment, held) if held else nullcontext():
        said = run(environment, folder, *order)
    return said, json.loads((folder / "run" / "recommendation.json").read_text())


def test_a_shared_card_without_bfloat16(tmp_path: Path) -> None:
    """Probes run with expandable segments, as they are recommended."""
    card = emulated_gpu("t4")
    asked = ("--batch-size", "64", "--optimizer", "adamw")
    machine = EmulatedMachine((card,))
    said, found = tune(machine, tmp_path, *EAGER, *asked, held=card.memory_bytes // 2)
    assert "on an emulated Tesla T4 (memory measured, times predicted):" in said
    assert found["setting"]["precision"] == "fp16"
    assert found["device"]["emulated"]
    assert "Other processes hold 7." in said
    assert found["evidence"]["flags"][0] == EMULATED
    assert found["evidence"]["flags"][1].startswith("other processes on the GPU hold 7.")
    records = read_records(tmp_path / "run" / "probes.jsonl").records
    assert {r.versions["allocator_config"] for r in records} == {"expandable_segments:True"}
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in emit(found, "timm").launch


def test_a_search_at_the_end_of_memory(tmp_path: Path) -> None:
    """Beside batches that run in 2 GiB others are out of memory, and the search goes on."""
    small = emulated_gpu("rtx-3090", memory_bytes=2 * GIB, context_bytes=256 * MIB)
    asked = ("--precision", "bf16", "--headroom", "0%", "--tolerance", "0%")
    sizes = ("--batch-size", "32,48,64,96", "--optimizer", "adamw")
    _, found = tune(EmulatedMachine((small,)), tmp_path, *EAGER, *asked, *sizes)
    records = read_records(tmp_path / "run" / "probes.jsonl").records
    ends = {r.setting.batch_size: r.status for r in records}
    assert set(ends.values()) == {"measured", "out_of_memory"}, ends
    measured = [size for size, end in ends.items() if end == "measured"]
    assert max(measured) < min(size for size in ends if size not in measured)
    assert found["setting"]["batch_size"] in measured


def test_two_cards(tmp_path: Path) -> None:
    asked = ("--gpus", "2", "--parallelism", "fsdp", "--batch-size", "32", "--precision", "bf16")
    more = (*EAGER, "--trials", "1")
    said, found = tune(EmulatedMachine((RTX_3090,) * 2), tmp_path, *asked, *more)
    assert "images/s of all 2 devices" in said
    assert found["evidence"]["flags"] == [EMULATED]
    assert found["evidence"]["world"]["world_size"] == 2


def test_a_device_that_fails_is_a_crash_and_no_lack_of_memory(tmp_path: Path) -> None:
    asked = ("--batch-size", "16", "--precision", "bf16", "--trials", "4")
    lost = emulated_gpu("rtx-3090", lost_after=2000)
    with started(EmulatedMachine((lost,))) as environment:
        order = ("tune", *MODEL, *EAGER, *asked, "--output", "run", "--quiet")
        said = run(environment, tmp_path, *order, status=1)
    records = read_records(tmp_path / "run" / "probes.jsonl").records
    assert {r.status for r in records} == {"crashed"}
    assert "ended because the device does not answer any more." in said
    assert "Nothing fits" not in said


def test_a_card_that_torch_has_no_code_for_is_named(tmp_path: Path) -> None:
    old = emulated_gpu("v100-sxm-16gb", name="Tesla K80", capability=(3, 7))
    with started(EmulatedMachine((old,))) as environment:
        order = ("tune", *MODEL, "--device", "cuda:0", "--output", "run")
        said = run(environment, tmp_path, *order, status=2)
    assert "has no code for Tesla K80 of compute capability 3.7" in said
