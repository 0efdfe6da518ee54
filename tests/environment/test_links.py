"""Real worlds over gloo: what they measure, and that none outlives its deadline or a dead rank."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from planner.cli import main
from planner.core.errors import PlannerError
from planner.core.schema.link import LinkCurve, LinkPoint
from planner.machine.facts import Facts, gather_facts
from planner.machine.hardware import find_gpu
from planner.machine.hardware.link_file import COLLECTIVES, read_link, write_link
from planner.machine.links.kept import kept_link, link_path, save_link
from planner.machine.links.plan import CPU_SIZES, LinkPlan, plan_link
from search.tuning.links.timing import measure_link
from tests.environment.recorded import recorded

WORKER = "search.tuning.links.worker"
SHORT = LinkPlan("gloo", 2, "cpu", sizes=(1024, 4096), budget_seconds=60.0, deadline_seconds=120.0)
ENDLESS = replace(SHORT, sizes=(1024,) * 5000, budget_seconds=1e6)
CURVE = LinkCurve(
    device="NVIDIA A100", backend="nccl", world_size=4,
    points=(LinkPoint(collective="all_reduce", num_bytes=1024, seconds=2e-5),),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANNER_CACHE_DIR", str(tmp_path / "cache"))


def ranks() -> list[psutil.Process]:
    """The living ranks of the worlds that this process started, in the order of their start."""
    parents: dict[psutil.Process, int] = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it ended since it was listed
            if WORKER in process.cmdline():
                parents[process] = process.ppid()
    by_pid = {process.pid: parent for process, parent in parents.items()}
    # A server's child is a supervisor, and its child a rank.
    found = [process for process, parent in parents.items() if by_pid.get(parent) in by_pid]
    return sorted(found, key=lambda process: process.pid)


def wait_for_ranks(count: int) -> list[psutil.Process]:
    end = time.monotonic() + 60
    while len(found := ranks()) < count and time.monotonic() < end:
        time.sleep(0.05)
    assert len(found) == count
    return found


@contextmanager
def measuring(plan: LinkPlan) -> Iterator[list[PlannerError]]:
    """A measurement in a thread, with what it raised; over when this ends."""
    raised: list[PlannerError] = []

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


def test_a_world_over_gloo_times_every_collective(tmp_path: Path) -> None:
    curve = measure_link(SHORT)
    assert {p.collective for p in curve.points} == set(COLLECTIVES)
    assert len(curve.points) == 2 * len(COLLECTIVES)
    assert {p.num_bytes // 1024 for p in curve.points} == {1, 4}
    assert (curve.backend, curve.world_size, curve.nodes) == ("gloo", 2, 1)
    assert curve.versions["torch"]
    assert ranks() == []
    write_link(tmp_path / "link.json", curve)
    assert read_link(tmp_path / "link.json") == curve


def test_the_budget_leaves_out_what_is_larger() -> None:
    curve = measure_link(replace(SHORT, sizes=(1024, 4 * 1024, 1 << 40), budget_seconds=1e-9))
    assert curve.points == (), "none was begun, and a terabyte was not asked for"


def test_a_rank_that_dies_ends_the_others_and_is_named() -> None:
    with measuring(replace(ENDLESS, world_size=3)) as raised:
        wait_for_ranks(3)[1].kill()
    (error,) = raised
    assert re.search(r"rank \d of 3: SIGKILL", error.message)  # they start in no order
    assert error.way_out
    assert ranks() == []


@pytest.mark.release
def test_a_rank_that_hangs_does_not_outlive_the_deadline() -> None:
    with measuring(replace(ENDLESS, deadline_seconds=8.0)) as raised:
        wait_for_ranks(2)[0].suspend()
    (error,) = raised
    assert "not done after 8 s: rank" in error.message
    assert ranks() == []


def test_a_rank_that_fails_by_itself_says_why() -> None:
    with pytest.raises(PlannerError, match=r"rank \d of 2: .*frobnicate.*, in the start"):
        measure_link(replace(SHORT, backend="frobnicate"))


def test_a_link_is_kept_and_read_back() -> None:
    path = link_path("NVIDIA A100", 4)
    assert save_link(CURVE) == path
    assert read_link(path) == CURVE
    assert path not in (link_path("NVIDIA A100", 8), link_path("NVIDIA H100", 4))


def test_a_damaged_file_counts_as_not_measured() -> None:
    a100 = find_gpu("a100-sxm-80gb")
    path = save_link(CURVE.model_copy(update={"device": a100.device_names[0]}))
    assert kept_link(a100, 2) == path
    for text in ("", "{", "[]", "{}", '{"link_format": 99}'):
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
