"""`planner emulate`: programs as people write them, unchanged, on emulated GPUs."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

import planner
from planner.cli import cli, main
from planner.core.units import MIB
from planner.machine.emulated.machine import SHARED_MEMORY
from planner.machine.hardware.overheads import CONTEXT_BYTES_HIGH
from planner.programs.emulated import EmulatedRun
from planner.report.programs import emulation_text
from tests.emulated.conftest import emulated

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(300), pytest.mark.usefixtures("libraries")]

PROGRAM = """
import os, sys, torch
batch, keep = int(sys.argv[2]), "keep" in sys.argv
rank = int(os.environ.get("LOCAL_RANK", 0))
torch.cuda.set_device(rank)
model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 9))
model = model.cuda()
if "RANK" in os.environ:
    torch.distributed.init_process_group("nccl")
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
optimizer = torch.optim.AdamW(model.parameters())
losses = []
for _ in range(1000):
    loss = model(torch.randn(batch, 512, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if keep:
        losses.append(torch.zeros(1 << 20, device="cuda"))
"""


CATCHES = """
import atexit, itertools, sys, torch
weight = torch.nn.Parameter(torch.zeros(9, device="cuda"))
optimizer = torch.optim.SGD([weight])
atexit.register(print, "the end")
for tries in itertools.count(1):
    try:
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    except:
        print("caught", tries)
"""


SELECTS = """
import sys, torch
weight = torch.nn.Parameter(torch.zeros(9, device="cuda"))
optimizer = torch.optim.SGD([weight])
mask = torch.zeros(9, device="cuda", dtype=torch.bool)
mask.nonzero()
for _ in range(2):
    if sys.argv[1] == "mask":
        weight.detach()[mask]
    weight.square().sum().backward()
    optimizer.step()
"""
SPAWNS = """
import sys, torch
def work(rank, store):
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", store, rank=rank, world_size=2)
    weight = torch.nn.Parameter(torch.zeros(9, device="cuda"))
    optimizer = torch.optim.SGD([weight])
    for _ in range(2):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    torch.distributed.destroy_process_group()
if __name__ == "__main__":
    torch.multiprocessing.spawn(work, (sys.argv[1],), 2)
"""

PEAKS = """
import sys, torch
from torch import nn
from torch.utils.checkpoint import checkpoint
if "plain" in sys.argv:
    nn.Module.__call__ = nn.Module._wrapped_call_impl
    torch.autograd._engine_run_backward = torch.autograd.graph._engine_run_backward
class Block(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide, self.norm, self.mlp = wide, nn.LayerNorm(64), nn.Linear(64, 64)
    def forward(self, x):
        if self.wide:
            torch.empty(32 << 20, device="cuda")
        return x + self.mlp(self.norm(x))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(i == 1) for i in range(3))
        self.head = nn.Linear(64, 4)
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)
net = Net().cuda()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(2):
    net(torch.randn(512, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

SWIN = """
import sys, torch, torchvision
model = torchvision.models.swin_t(num_classes=8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
images = torch.randn(int(sys.argv[1]), 3, 224, 224, device="cuda")
for _ in range(2):
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(images).square().mean()
    loss.backward()
    optimizer.step()
"""

TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
SENDS = """
import os, sys, time, torch, torch.distributed as dist
from pathlib import Path
rank, came = int(os.environ["RANK"]), Path(sys.argv[1])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
pair, got, mine, lists = dist.new_group([0, 1]), [None, None], [None], [rank, "of", "x" * rank]
dist.all_gather_object(got, "x" * (10 + 500 * rank))
assert [len(text) for text in got] == [10, 510]
dist.gather_object(rank, got if rank else None, dst=1)
assert got == [0, 1] or not rank
dist.broadcast_object_list(lists, src=1, group=pair)
assert lists == [1, "of", "x"]
dist.scatter_object_list(mine, None if rank else ["a", "b"], group_src=0)
assert mine == ["ab"[rank]]
if not rank:
    time.sleep(1)
    came.touch()
dist.barrier()
assert came.exists()
weight = torch.nn.Parameter(torch.zeros(9, device="cuda"))
optimizer = torch.optim.SGD([weight])
for _ in range(2):
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
print("sent")
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return str(path)


def left(pid: int) -> list[str]:
    """What a process put into shared memory."""
    return [path.name for path in SHARED_MEMORY.glob(f"planner-emulated-{pid}-*")]


@pytest.fixture(scope="module")
def large_run(tmp_path_factory: pytest.TempPathFactory) -> EmulatedRun:
    folder, before = tmp_path_factory.mktemp("large"), left(os.getpid())
    run, _ = emulated(folder, PROGRAM, "-b", "4096", gpu="rtx-3090", steps=3)
    assert left(os.getpid()) == before
    return run


def test_the_peak_is_torch_s_own_and_the_line_is_the_user_s(large_run: EmulatedRun) -> None:
    run = large_run
    assert (run.fits, run.status, run.steps) == (True, 0, 3)
    (process,) = run.processes
    (peak,) = process.peaks
    assert peak.name.endswith("(emulated)")
    assert peak.allocated_bytes < peak.reserved_bytes < peak.used_bytes
    assert sum(g.num_bytes for g in peak.groups) == pytest.approx(peak.allocated_bytes, rel=1e-3)
    assert any(group.where.endswith("train.py:14 <module>") for group in peak.groups)
    assert process.growth is None
    assert process.faults == ()


def test_the_peak_s_module_is_known_and_costs_no_byte(tmp_path: Path) -> None:
    told, plain = (
        emulated(tmp_path, PEAKS, *words, gpu="t4")[0].processes[0].peaks[0]
        for words in ((), ("plain",))
    )
    assert (told.phase, told.module, plain.module) == ("backward", "Net.blocks.1", "")
    assert "train.py:" in told.where
    for size in ("allocated_bytes", "reserved_bytes", "outside_bytes"):
        assert getattr(told, size) == getattr(plain, size)


def test_the_traceback_of_an_out_of_memory_is_the_users(tmp_path: Path) -> None:
    _, text = emulated(tmp_path, SWIN, "64", gpu="rtx-3090", memory_bytes="3GiB")
    assert "torch.OutOfMemoryError: " in text
    assert "sitecustomize.py" not in text


def test_a_program_that_catches_its_end_is_ended(tmp_path: Path) -> None:
    run, said = emulated(tmp_path, CATCHES, gpu="rtx-3090", steps=2)
    assert said.split("\n") == ["caught 2", "caught 3", "caught 4", "the end", ""]
    assert (run.fits, run.status, run.steps) == (True, 0, 2)


def test_a_program_s_own_history_leaves_ours_whole(large_run: EmulatedRun, tmp_path: Path) -> None:
    own = "from torch.cuda.memory import _record_memory_history as history; history(max_entries=9)"
    dump = f"torch.cuda.memory._dump_snapshot('{tmp_path}/own.pickle'); history(enabled=None)"
    text = PROGRAM.replace("losses = []", own).replace("if keep:", f"{dump}\n    if keep:")
    run, _ = emulated(tmp_path, text, "-b", "4096", gpu="rtx-3090", steps=3)
    (ours,), (alone,) = run.processes[0].peaks, large_run.processes[0].peaks
    assert ours.allocated_bytes == alone.allocated_bytes
    assert ours.reserved_bytes == alone.reserved_bytes
    assert planner.explain(tmp_path / "own.pickle").kind == "snapshot"


@pytest.mark.parametrize("how", ["mask", "neither"])
def test_steps_that_select_by_values_are_told_of(how: str) -> None:
    """And not what selected before the first step, as a program that makes its data may. It asks
    for torch before it imports it, as transformers and datasets do."""
    text = f"import importlib.util\nimportlib.util.find_spec('torch')\n{SELECTS}"
    run = planner.emulate([sys.executable, "-c", text, how], gpu="rtx-3090")
    assert (run.fits, run.selects) == (True, how != "neither")
    said = "Its steps select by values on the GPU" in emulation_text(run)
    assert said is run.selects


def test_what_grows_is_named_by_its_line(tmp_path: Path) -> None:
    kept = tmp_path / "peak.pickle"
    options = {"gpu": "rtx-3090", "steps": 8, "snapshot": kept}
    run, _ = emulated(tmp_path, PROGRAM, "-b", "64", "keep", **options)
    growth = run.processes[0].growth
    assert growth.bytes_per_step == run.processes[0].grown_bytes == 4 * MIB
    assert (run.fits, run.fits_so_far) == (None, True)
    assert growth.groups[0].where.endswith("train.py:19 <module>")
    assert planner.explain(kept).kind == "snapshot"


def test_ranks_of_torchrun_have_a_card_each_and_what_they_send_arrives(tmp_path: Path) -> None:
    how = {"by": (*TORCHRUN, "--standalone"), "gpu": "rtx-4090", "gpus": 2}
    run, said = emulated(tmp_path, SENDS, str(tmp_path / "came"), **how)
    assert said.count("sent") == 2
    assert (run.status, run.steps) == (0, 2)
    assert [(p.rank, p.peaks[0].device) for p in run.processes] == [(0, 0), (1, 1)]


def test_ranks_that_a_program_spawns_have_torch_s_numbers(tmp_path: Path) -> None:
    how = {"gpu": "rtx-4090", "gpus": 2, "snapshot": tmp_path / "peak.pickle"}
    run, _ = emulated(tmp_path, SPAWNS, f"file://{tmp_path}/store", **how)
    assert [(p.rank, p.steps, p.peaks[0].device) for p in run.processes] == [(0, 2, 0), (1, 2, 1)]
    assert (tmp_path / "peak_rank1.pickle").exists()


HOLDS = """
import sys, torch
held = torch.zeros(int(sys.argv[2]) << 26, device="cuda")
small = held[:1].requires_grad_()
small.grad = held[:1].detach()
optimizer = torch.optim.SGD([small])
for _ in range(2):
    optimizer.step()
"""


def test_the_boundary_that_is_found_is_the_boundary() -> None:
    """Derived: weights of 256 MiB each in 1 GiB less the largest context."""
    options = ["--gpu", "rtx-3090", "--memory", "1GiB", "--json", "--vary", "-b"]
    command = ["emulate", *options, "--", sys.executable, "-c", HOLDS, "-b", "1"]
    found = CliRunner().invoke(cli, command)
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    assert told["largest"] == ((1 << 30) - CONTEXT_BYTES_HIGH) // (256 * MIB)
    assert told["next_larger"] == told["largest"] + 1


def test_memory_that_others_hold_is_not_there(tmp_path: Path) -> None:
    options = {"gpu": "rtx-3090", "in_use": "22GiB", "steps": 2}
    shared, _ = emulated(tmp_path, PROGRAM, "-b", "65536", **options)
    assert shared.fits is False
    failed = shared.out_of_memory
    assert failed.where.endswith("train.py:14 <module>")


def test_a_python_that_does_not_load_our_record_is_told_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["emulate", "--gpu", "rtx-3090", "--", sys.executable, "-I", "-c", "pass"]
    assert main(command) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("Not known: no Python of the program loaded our record (exit status 0)")
    assert "Start python without -I, -E and -S" in text
    run = planner.emulate([*command[4:5], "-c", "pass"], gpu="rtx-3090")
    assert "no process used the GPU through torch" in emulation_text(run)


def test_a_card_without_room_for_a_context_fits_nothing(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "the CUDA context alone needs 454.90 MiB (assumed), and 300.00 MiB are free."
    command = ["emulate", "--gpu", "rtx-3090", "--memory", "300MiB", "--"]
    assert main([*command, sys.executable, program, "-b", "64"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("Does not fit in 300.00 MiB of NVIDIA GeForce RTX 3090 (emulated): ")
    assert said in text


def test_the_exit_status_is_the_program_s() -> None:
    command = ["emulate", "--gpu", "rtx-3090", "--"]
    assert main([*command, sys.executable, "-c", "raise SystemExit(7)"]) == 7
    assert main([*command, sys.executable, "-c", "pass"]) == 1
    assert main([*command[:-1], "--snapshot", "/nowhere/s.pickle", "--", sys.executable]) == 1
    assert main([*command, "no-such-program"]) == 2


@contextmanager
def in_its_steps(program: str) -> Iterator[subprocess.Popen[str]]:
    """The command, once a step of the program was seen."""
    command = [sys.executable, "-m", "planner", "emulate", "--gpu", "t4", "--progress", "--"]
    with subprocess.Popen(
        [*command, sys.executable, program, "-b", "64"], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:  # fmt: skip
        assert process.stderr is not None
        while not process.stderr.readline().startswith("step "):
            assert process.poll() is None
        yield process


@pytest.mark.parametrize(
    ("number", "how"),
    [(signal.SIGINT, "it was interrupted"), (signal.SIGTERM, "it was ended by SIGTERM")],
)
def test_an_interrupt_is_answered_with_what_was_needed_until_then(
    program: str, number: signal.Signals, how: str
) -> None:
    text = Path(program).read_text().replace("range(1000)", "range(10**9)")
    Path(program).write_text(text)
    with in_its_steps(program) as process:
        process.send_signal(number)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert said.lstrip().startswith(f"Until {how}:\nFits in 14.56 GiB of Tesla T4")


def test_nothing_is_left_when_it_is_killed(program: str) -> None:
    with in_its_steps(program) as process:
        process.kill()
    deadline = time.monotonic() + 60
    while (found := [*left(process.pid), *alive(program)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert found == []


def alive(program: str) -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if program in (p.info["cmdline"] or ())]
