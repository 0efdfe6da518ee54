"""What is concluded from how a program ended: the cause that is plain to see, and no other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import planner
from planner.report.emulation import emulation_text

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(300), pytest.mark.usefixtures("libraries")]

TRAIN = """
import os, torch
M = 1 << 20
net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(3):
    net(torch.randn(1024, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
FRAGMENTS = """
keep = []
for _ in range(20):
    large = torch.empty(500 * M, dtype=torch.uint8, device="cuda")
    del large
    keep.append(torch.empty(260 * M, dtype=torch.uint8, device="cuda"))
torch.empty(2048 * M, dtype=torch.uint8, device="cuda")
"""
ONE_LINE = """
got = []
with torch.no_grad():
    for _ in range(1000):
        got.append(torch.empty(32 * M, dtype=torch.uint8, device="cuda"))
"""
EVALUATION = """
total = 0
for _ in range(2000):
    total = total + net(torch.randn(1024, 1024, device="cuda")).sum()
"""


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        (FRAGMENTS, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        (ONE_LINE, "was asked for by one line"),
        (EVALUATION, "An evaluation belongs under torch.no_grad()"),
    ],
)
def test_an_end_without_memory_has_its_cause(tmp_path: Path, ending: str, said: str) -> None:
    file = tmp_path / "train.py"
    file.write_text(TRAIN + ending)
    run = planner.emulate([sys.executable, str(file)], gpu="rtx-3060-12gb", output=-3)
    assert run.fits is False
    text = " ".join(emulation_text(run).split())
    assert said in text.partition("Next: ")[2].partition(" Alive when")[0]


ENDS_EARLY = """
import os, torch
torch.ones(1 << 28, device="cuda")
os.kill(os.getpid(), 9)
"""
SCRIPTED = """
import torch
net = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).cuda())
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(3):
    net(torch.randn(2, 8, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_a_program_that_is_killed_used_the_gpu(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(ENDS_EARLY)
    run = planner.emulate([sys.executable, str(file)], gpu="rtx-3060-12gb", output=-3)
    said = " ".join(emulation_text(run).split())
    assert said.startswith("Not known: it ended (exit status 137) before a step of it was seen.")


def test_a_scripted_module_runs_as_without_us(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPTED)
    run = planner.emulate([sys.executable, str(file)], gpu="rtx-3060-12gb", output=-3)
    assert (run.status, run.steps) == (0, 3)
