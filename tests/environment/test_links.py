"""Links between GPUs: what is timed, kept and read; a real world is in tests/cli/test_doctor.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.cli import main
from planner.core.errors import PlannerError
from planner.core.schema.link import LinkCurve, LinkPoint
from planner.machine.facts import Facts, gather_facts
from planner.machine.hardware import find_gpu
from planner.machine.hardware.link_file import read_link
from planner.machine.links.kept import kept_link, link_path, save_link
from planner.machine.links.plan import CPU_SIZES, plan_link
from tests.environment.recorded import recorded

CURVE = LinkCurve(
    device="NVIDIA A100", backend="nccl", world_size=4,
    points=(LinkPoint(collective="all_reduce", num_bytes=1024, seconds=2e-5),),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANNER_CACHE_DIR", str(tmp_path / "cache"))


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
