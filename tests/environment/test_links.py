"""Real worlds over gloo: what they measure, and that none outlives its deadline, a dead rank or the
process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from planner.cli import main
from planner.environment.facts import Facts, gather_facts
from planner.environment.links import world
from planner.environment.links.kept import kept_link, link_path, save_link
from planner.environment.links.plan import CPU_SIZES, LinkPlan, plan_link, read_world_size
from planner.environment.links.world import measure_link
from planner.errors import PlannerError, UsageError
from planner.hardware import find_gpu
from planner.hardware.link_file import COLLECTIVES, read_link, write_link
from planner.schema.link import LinkCurve, LinkPoint
from tests.environment.recorded import recorded

RANK = "planner.environment.links.rank"
SHORT = LinkPlan("gloo", 2, "cpu", sizes=(1024, 4096), budget_seconds=60.0, deadline_seconds=120.0)
ENDLESS = replace(SHORT, sizes=(1024,) * 5000, budget_seconds=1e6)
# Measures without end, and makes a file once the first point is there.
PARENT = """
import sys
from pathlib import Path
from planner.environment.links import world
from tests.environment.test_links import ENDLESS

hear = world._hear

def heard(rank, line, found):
    hear(rank, line, found)
    if found.points:
        Path(sys.argv[1]).touch()

world._hear = heard
world.measure_link(ENDLESS)
"""
CURVE = LinkCurve(
    device="NVIDIA A100", backend="nccl", world_size=4,
    points=(LinkPoint(collective="all_reduce", num_bytes=1024, seconds=2e-5),),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANNER_CACHE_DIR", str(tmp_path / "cache"))


def ranks_of(parent: int) -> list[int]:
    """The rank processes that `parent` started and that live, in the order of their start."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            is_rank = RANK in (folder / "cmdline").read_text()
        except OSError:
            continue
        if is_rank and int(stat[1]) == parent and stat[0] != "Z":
            found.append(int(folder.name))
    return sorted(found)


def wait_for(found: object, seconds: float = 60.0) -> bool:
    """Whether a call becomes true, however busy the machine is."""
    assert callable(found)
    end = time.monotonic() + seconds
    while not found():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@contextmanager
def measuring(plan: LinkPlan) -> Iterator[list[BaseException]]:
    """A measurement in a thread, with what it raised; over when this ends."""
    raised: list[BaseException] = []

    def measure() -> None:
        try:
            measure_link(plan)
        except PlannerError as error:
            raised.append(error)

    thread = threading.Thread(target=measure)
    thread.start()
    try:
        yield raised
    finally:
        thread.join(timeout=120)
        assert not thread.is_alive()


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.combinations)])
def test_a_world_over_gloo_times_every_collective(world_size: int, tmp_path: Path) -> None:
    curve = measure_link(replace(SHORT, world_size=world_size))
    assert {p.collective for p in curve.points} == set(COLLECTIVES)
    assert len(curve.points) == 2 * len(COLLECTIVES)
    # Of three ranks each has an equal share: 1024 bytes become 1032.
    assert all(p.num_bytes % (4 * world_size) == 0 for p in curve.points)
    assert {p.num_bytes // 1024 for p in curve.points} == {1, 4}
    assert (curve.backend, curve.world_size, curve.nodes) == ("gloo", world_size, 1)
    assert curve.versions["torch"]
    assert ranks_of(os.getpid()) == []
    write_link(tmp_path / "link.json", curve)
    assert read_link(tmp_path / "link.json") == curve


def test_the_budget_leaves_out_what_is_larger() -> None:
    curve = measure_link(replace(SHORT, sizes=(1024, 4 * 1024, 1 << 40), budget_seconds=1e-9))
    assert curve.points == (), "none was begun, and a terabyte was not asked for"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_that_dies_ends_the_others_and_is_named(number: signal.Signals) -> None:
    with measuring(replace(ENDLESS, world_size=3)) as raised:
        assert wait_for(lambda: len(ranks_of(os.getpid())) == 3)
        os.kill(ranks_of(os.getpid())[1], number)
    (error,) = raised
    assert isinstance(error, PlannerError)
    assert f"rank 1 of 3 was ended by {number.name}" in error.message
    assert error.way_out
    assert ranks_of(os.getpid()) == []


@pytest.mark.workers
def test_a_rank_that_hangs_does_not_outlive_the_deadline() -> None:
    with measuring(replace(ENDLESS, deadline_seconds=8.0)) as raised:
        assert wait_for(lambda: len(ranks_of(os.getpid())) == 2)
        os.kill(ranks_of(os.getpid())[0], signal.SIGSTOP)
    (error,) = raised
    assert "was not measured within 8 s: rank 0 was at" in str(error)
    assert ranks_of(os.getpid()) == []


def test_a_rank_that_fails_by_itself_says_why() -> None:
    with pytest.raises(PlannerError, match=r"rank \d of 2 ended with status 1 at .*frobnicate"):
        measure_link(replace(SHORT, backend="frobnicate"))


@pytest.mark.workers
def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    measuring = tmp_path / "measuring"
    parent = subprocess.Popen(
        [sys.executable, str(script), str(measuring)], env={**os.environ, "PYTHONPATH": path}
    )
    ranks: list[int] = []
    try:
        assert wait_for(measuring.exists)
        ranks = ranks_of(parent.pid)
        os.kill(ranks[0], signal.SIGSTOP)
        time.sleep(0.5)  # the other waits for it, in a collective
    finally:
        parent.kill()
        parent.wait()
    try:
        assert wait_for(lambda: not Path(f"/proc/{ranks[1]}").exists())
    finally:
        os.kill(ranks[0], signal.SIGCONT)
    assert wait_for(lambda: not Path(f"/proc/{ranks[0]}").exists())


def test_a_rank_that_was_killed_is_named_before_the_peer_that_lost_it(tmp_path: Path) -> None:
    scripts = ("raise SystemExit(1)", "import os; os.kill(os.getpid(), 9)")
    ranks = []
    for number, script in enumerate(scripts):
        process = subprocess.Popen([sys.executable, "-c", script])
        process.wait()
        (tmp_path / f"{number}").touch()
        ranks.append(world._Rank(number, process, tmp_path / f"{number}"))
    assert "rank 1 of 2 was ended by SIGKILL" in world._ended(ranks[0], ranks).message


def test_a_link_is_kept_and_read_back() -> None:
    path = link_path("NVIDIA A100", 4)
    assert save_link(CURVE) == path
    assert read_link(path) == CURVE
    assert path not in (link_path("NVIDIA A100", 8), link_path("NVIDIA H100", 4))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"link_format": 99}'])
def test_a_damaged_file_counts_as_not_measured(text: str) -> None:
    a100 = find_gpu("a100-sxm-80gb")
    path = save_link(CURVE.model_copy(update={"device": a100.device_names[0]}))
    assert kept_link(a100, 2) == path
    path.write_text(text)
    assert kept_link(a100, 2) is None


def test_a_kept_link_serves_as_many_gpus_or_fewer() -> None:
    a100 = find_gpu("a100-sxm-80gb")
    assert kept_link(a100, 2) is None
    eight = CURVE.model_copy(update={"device": a100.device_names[0], "world_size": 8})
    four = eight.model_copy(update={"world_size": 4})
    paths = {curve.world_size: save_link(curve) for curve in (eight, four)}
    assert [kept_link(a100, count) for count in (2, 4, 5, 8, 9)] == [
        paths[4], paths[4], paths[8], paths[8], None,
    ]  # fmt: skip
    assert kept_link(find_gpu("h100-sxm-80gb"), 2) is None
    paths[4].rename(paths[4].with_name("of another torch.json"))
    save_link(eight.model_copy(update={"backend": "gloo"}))
    assert kept_link(a100, 2) is None


def test_an_estimate_takes_the_kept_link_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    a100 = find_gpu("a100-sxm-80gb")
    path = save_link(CURVE.model_copy(update={"device": a100.device_names[0]}))
    estimate = ["estimate", "timm:swin_tiny_patch4_window7_224", "--gpu", a100.name, "--gpus", "4"]
    assert main([*estimate]) == 0
    assert f"what was measured here: {path}" in capsys.readouterr().err
    assert main([*estimate, "--link", "pcie4"]) == 0
    assert "measured here" not in capsys.readouterr().err


def facts(machine: str) -> Facts:
    return gather_facts(recorded(machine))


def test_gpus_are_timed_over_nccl() -> None:
    plan = plan_link("auto", None, facts("h100-pair"))
    assert (plan.backend, plan.world_size) == ("nccl", 2)
    assert plan.device == "NVIDIA H100 80GB HBM3"
    assert plan.topology == "nvidia-smi topo -m: NV18"


@pytest.mark.parametrize(("device", "machine"), [("cpu", "h100-pair"), ("auto", "cpu-torch")])
def test_processes_are_timed_over_gloo(device: str, machine: str) -> None:
    plan = plan_link(device, 3, facts(machine))
    assert (plan.backend, plan.world_size, plan.sizes) == ("gloo", 3, CPU_SIZES)


@pytest.mark.parametrize(
    ("device", "count", "machine", "words"),
    [
        ("auto", 4, "h100-pair", "--gpus 4 are more than the 2 GPUs"),
        ("auto", None, "h200", "torch sees one GPU (NVIDIA H200)"),
        ("cuda:1", None, "h100-pair", "not 'cuda:1'"),
        ("cuda:0", None, "cpu-torch", "cannot be used"),
        ("cpu", 65, "h100-pair", "at most 64 processes"),
    ],
)
def test_what_cannot_be_timed_is_refused(
    device: str, count: int | None, machine: str, words: str
) -> None:
    with pytest.raises(PlannerError) as found:
        plan_link(device, count, facts(machine))
    assert words in found.value.message
    assert found.value.way_out


@pytest.mark.parametrize("text", ["1", "0", "-2", "two", "2.5", "²", "9999999"])
def test_no_number_of_devices(text: str) -> None:
    with pytest.raises(UsageError, match="two devices or more"):
        read_world_size(text)
