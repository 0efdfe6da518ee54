"""What is concluded from how a program ended: the cause that is plain to see, and no other."""

import sys
from pathlib import Path

import pytest

from planner.cli import main
from planner.programs.emulated import EmulatedRun
from planner.report.programs import emulation_text
from tests.emulated.conftest import emulated

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
        (FRAGMENTS, "Run it again behind PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        (ONE_LINE, "was asked for by one line"),
        (EVALUATION, "An evaluation belongs under torch.no_grad()"),
    ],
)
def test_an_end_without_memory_has_its_cause(tmp_path: Path, ending: str, said: str) -> None:
    run, text = concluded(tmp_path, TRAIN + ending)
    assert run.fits is False
    assert said in text.partition("Next: ")[2].partition(" Alive when")[0]


RESERVES = """
import torch
M = 1 << 20
weight = torch.nn.Parameter(torch.zeros(1024, device="cuda"))
optimizer = torch.optim.SGD([weight], 0.1)
keep = []
for _ in range(30):
    one, other = (torch.empty(n * M // 2, dtype=torch.uint8, device="cuda") for n in (182, 91))
    keep.append(torch.empty(2 * M, dtype=torch.uint8, device="cuda"))
    del one, other
    weight.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SPLIT = "max_split_size_mb:128,expandable_segments:True"
UNTRAINED = """
import torch
net = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(3):
    net(torch.ones(8, 64, device="cuda")).sum()
    optimizer.step()
raise ValueError("no data")
"""


def test_a_program_that_grows_or_trains_nothing_is_not_known_to_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, text = concluded(tmp_path, UNTRAINED)
    assert (run.fits, run.fits_so_far) == (None, True)
    assert text.startswith("Fits for the 3 steps that were run, in")
    assert "Not known beyond: no parameter of an optimizer had a gradient" in text
    assert "It ended by ValueError: no data. If that follows from a value" in text
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", SPLIT)
    run, text = concluded(tmp_path, RESERVES)
    assert run.fits is None
    assert "Not known beyond: reserved memory grows by 138" in text
    assert ": live memory" not in text


def test_what_steps_did_not_reach_is_told(tmp_path: Path) -> None:
    run, text = concluded(tmp_path, TRAIN + EVALUATION, steps=3)
    assert (run.fits, run.is_cut) == (True, True)
    assert text.startswith("Fits for the 3 steps that were run, in")
    assert "Not run: what comes after them, such as an evaluation." in text


@pytest.mark.parametrize("written", ['{"a":', "[]"])
def test_a_record_that_is_not_whole_is_an_error(
    written: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program = (
        f"import os; open(os.environ['PLANNER_EMULATE_FOLDER'] + '/1.json', 'w').write('{written}')"
    )
    assert main(["emulate", "--gpu", "t4", "--", sys.executable, "-c", program]) == 1
    said = capsys.readouterr().err
    assert said.startswith("Error: what a process of the program wrote down is not whole")


def concluded(tmp_path: Path, program: str, **options: int) -> tuple[EmulatedRun, str]:
    run, _ = emulated(tmp_path, program, gpu="rtx-3060-12gb", **options)
    return run, " ".join(emulation_text(run).split())


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
    _, said = concluded(tmp_path, ENDS_EARLY)
    assert said.startswith("Not known: it ended (exit status 137) before a step of it was seen.")


def test_a_scripted_module_runs_as_without_us(tmp_path: Path) -> None:
    run, _ = concluded(tmp_path, SCRIPTED)
    assert (run.status, run.steps) == (0, 3)
