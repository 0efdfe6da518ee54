"""What each judge says: of recorded machines, and where none shows it, of one that is changed."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from pydantic import TypeAdapter

from planner.cli import main
from planner.core.errors import PlannerError
from planner.core.units import GIB
from planner.machine import torch_build
from planner.machine.doctor import MachineFacts, install_line, load_facts, read_facts
from planner.machine.findings import CARD_JUDGES, JUDGES, SWITCHES, Finding, judge
from planner.machine.host import memory_room, read_host
from planner.machine.torch_build import (
    driver_runs,
    fitting_build,
    lacking_kernels,
    minimum_driver,
)
from planner.report.doctor import facts_text
from tests.environment.recorded import NAMES, expected, raw_machine, recorded

ROOT = Path(__file__).parents[2]
machine = TypeAdapter(MachineFacts).validate_python


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_machine_has_its_findings(name: str) -> None:
    """Those that are written beside it, and no others."""
    found = judge(recorded(name))
    assert sorted((finding.level, finding.name) for finding in found) == expected(name)
    assert all(f.evidence and f.cost and f.next_step for f in found)


def changed(name: str, **answers: dict[str, Any]) -> list[Finding]:
    """The findings of a recorded machine of which torch, the host, the variables or the first card
    (`card`) answer otherwise."""
    raw = raw_machine(name)
    raw["cards"][0] |= answers.pop("card", {})
    told = {part: raw.get(part, {}) | answer for part, answer in answers.items()}
    return judge(machine(raw | told))


def test_what_to_type_is_for_the_driver_and_the_card() -> None:
    def line(name: str, **torch: Any) -> str:
        raw = raw_machine(name)
        raw["torch"] |= torch
        return install_line(machine(raw))

    old = line("driver-too-old")
    assert old.startswith("pip uninstall --yes torch torchvision && ")
    assert old.endswith(
        '"torch==2.13.*" torchvision --index-url https://download.pytorch.org/whl/cu126'
    )
    assert line("h200") == ""
    assert line("h200", error="No module named 'torch'").endswith("/cu130")
    assert line("laptop-old-driver") == "", "no published build"
    assert line("rocm", error="No module named 'torch'") == "", "a build for CUDA is no help"
    assert line("h200", error="it took over 60 s") == ""
    assert line("v100-no-kernels").endswith("/cu126")


@pytest.mark.parametrize(
    ("torch", "name", "text"),
    [
        ({"error": "ImportError: libcudart"}, "torch.build", "cannot be imported"),
        ({"arch_list": ["sm_80"]}, "torch.build", "no code for NVIDIA H200"),
        ({"arch_list": ["compute_90"]}, "torch.build", "only PTX"),
        ({"failed": {"torch.cuda.nccl.version()": "it ended with status -11"}}, "torch.build",
         "asked for torch.cuda.nccl.version()"),
        ({"cudnn": ""}, "torch.cudnn", "no cuDNN"),
        ({"available": False, "gpus": [], "reason": "no"}, "device.none", "cannot start CUDA"),
    ],
)  # fmt: skip
def test_torch_beside_a_good_driver(torch: dict[str, Any], name: str, text: str) -> None:
    (found,) = changed("h200", torch=torch)
    assert found.name == name
    assert text in found.message


def test_what_is_hidden_empty_or_not_there() -> None:
    of_mig = changed("mig", card={"instances": 0})
    assert [(f.name, f.level) for f in of_mig] == [("card.mig", "fault")]
    four = recorded("rtx4090-no-p2p")
    assert judge(replace(four, variables={"CUDA_VISIBLE_DEVICES": "2"})) == []
    h200 = recorded("h200")
    for reason, name in (("the driver is too old", "driver.too-old"), ("no", "device.none")):
        torch = replace(h200.torch, available=False, gpus=(), reason=reason)
        (found,) = judge(replace(h200, cards=(), driver="", torch=torch))
        assert found.name == name


@pytest.mark.parametrize(
    ("of", "answer", "name", "level"),
    [
        ("card", {"recovery": "a reboot"}, "card.reset", "fault"),
        ("card", {"reasons": ["hw_slowdown"]}, "card.throttled", "warning"),
        ("card", {"reasons": ["sw_power_cap"]}, None, ""),
        ("card", {"generation": 1, "is_resting": False}, "link.pcie", "warning"),
        ("card", {"generation": 1, "is_resting": True}, None, ""),
        ("card", {"lanes": 4, "is_virtual": True}, "link.pcie", "note"),
        ("variables", {"CUDA_VISIBLE_DEVICES": "-1"}, "device.none", "fault"),
        ("variables", {"CUDA_LAUNCH_BLOCKING": "0"}, None, ""),
        ("variables", {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, None, ""),
        ("variables", {"NVIDIA_TF32_OVERRIDE": "1"}, None, ""),
        ("variables", {"PYTORCH_ALLOC_CONF": "a", "PYTORCH_CUDA_ALLOC_CONF": "a"},
         "settings.allocator", "warning"),
        ("host", {"shared_memory_bytes": 512 << 20}, "host.shared-memory", "warning"),
        ("host", {"shared_memory_bytes": 64 << 20}, "host.shared-memory", "fault"),
        ("host", {"quota_cpus": 2.5}, "host.quota", "warning"),
    ],
)  # fmt: skip
def test_one_answer_of_a_good_machine(
    of: str, answer: dict[str, Any], name: str | None, level: str
) -> None:
    found = changed("h200", **{of: answer})
    assert [(f.name, f.level) for f in found] == ([(name, level)] if name else [])


def test_each_variable_that_is_a_switch_is_told_and_of_nccl_only_beside_another_card() -> None:
    said = dict.fromkeys((switch.variable for switch in SWITCHES), "1")
    said |= {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NVIDIA_TF32_OVERRIDE": "0", "NCCL_P2P_LEVEL": "0"}
    several = replace(recorded("dgx-a100"), variables=said)
    alone = replace(several, variables={**said, "CUDA_VISIBLE_DEVICES": "0"})
    for facts, told in ((several, said), (alone, {v for v in said if not v.startswith("NCCL_")})):
        found = judge(facts)
        assert {f.message.partition("=")[0] for f in found} == set(told)
        assert {f.name for f in found} == {"settings.variable"}
    assert judge(replace(several, variables=dict.fromkeys(said, ""))) == []


def test_a_container_without_the_drivers_utilities() -> None:
    (found,) = judge(replace(recorded("no-smi"), cards=()))
    assert (found.name, found.level) == ("container.gpu", "warning")
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in found.next_step


@pytest.mark.parametrize(
    ("error", "step"),
    [
        ("RM has detected an NVML/RM version mismatch.", "Reboot"),
        ("Driver Not Loaded", "sudo modprobe nvidia"),
        ("GPU 1: GPU is lost", "sudo dmesg"),
    ],
)
def test_a_driver_that_does_not_answer(error: str, step: str) -> None:
    (found,) = judge(replace(recorded("h200"), driver_error=error))
    assert (found.name, found.level) == ("device.none", "fault")
    assert error in found.message
    assert found.next_step.startswith(step)


@pytest.mark.parametrize(
    ("driver", "cuda", "windows", "runs"),
    [
        ("525.60.11", "12.6", False, False),
        ("527.41", "12.6", True, False),
        ("580.95.05", "99.0", False, None),
        ("", "12.6", False, None),
    ],
)
def test_nvidias_table_of_drivers(driver: str, cuda: str, windows: bool, runs: bool | None) -> None:
    assert driver_runs(driver, cuda, windows) is runs
    assert (minimum_driver(cuda) is None) == (cuda == "99.0")


@pytest.mark.parametrize(
    ("driver", "capability", "torch", "build"),
    [
        ("580.95.05", (9, 0), "2.13.0", "torch 2.13 for CUDA 13.0 (cu130)"),
        ("570.133.20", (12, 0), "2.13.0", "torch 2.11 for CUDA 12.8 (cu128)"),  # 12.6 has none
        ("570.133.20", (7, 0), "2.10.0", "torch 2.10 for CUDA 12.8 (cu128)"),
        ("580.95.05", (3, 5), "2.13.0", None),
        ("", None, "2.4.1", "torch 2.15 for CUDA 13.2 (cu132)"),
        ("570.133.20", (8, 0), "2.15.0", "torch 2.14 for CUDA 12.6 (cu126)"),
    ],
)
def test_which_build_fits(
    driver: str, capability: tuple[int, int] | None, torch: str, build: str | None
) -> None:
    found = fitting_build(driver, capability, torch)
    assert (None if found is None else str(found)) == build


@pytest.mark.parametrize(
    ("cuda", "card", "said"),
    [
        ("13.0", (6, 1), "capability 6.1: install torch 2.14 for CUDA 12.6"),
        ("12.6", (12, 0), "capability 12.0: install torch 2.14 for CUDA 13"),
        ("12.6", (6, 1), None),
        ("", (6, 1), None),  # a build for the CPU, or none
        ("13.0", None, None),  # AMD
    ],
)
def test_a_card_without_kernels_in_the_installed_torch_is_told(
    monkeypatch: pytest.MonkeyPatch, cuda: str, card: tuple[int, int] | None, said: str | None
) -> None:
    assert torch_build.installed_build() == (torch.version.cuda or "cpu")
    monkeypatch.setattr(torch_build, "installed_version", lambda package: "2.14.1")
    monkeypatch.setattr(torch_build, "installed_build", lambda: cuda)
    found = lacking_kernels(card)
    assert found is said is None or (said is not None and said in str(found))


def test_p2p_says_why_and_what_to_do() -> None:
    (card,) = judge(recorded("rtx4090-no-p2p"))
    assert card.message.startswith("6 pairs")
    assert "the GPU does not support it" in card.evidence
    assert "IOMMU" not in card.next_step
    board = judge(recorded("pcie-two-sockets"))[0]
    assert "ACS" in board.next_step


def test_faults_come_first_and_say_everything() -> None:
    text = facts_text(recorded("bad-settings"))
    levels = re.findall(r"^(fault|warning|note):", text, re.MULTILINE)
    assert levels == sorted(levels, key=["fault", "warning", "note"].index)
    assert text.index("  read  ") < text.index("  cost  ") < text.index("  next  ")
    four = recorded("dgx-a100")
    hot = replace(four, cards=tuple(replace(c, reasons=("hw_slowdown",)) for c in four.cards))
    assert facts_text(hot).count("is slowed") == 1, "of cards that are alike it is said once"
    assert "same of cuda:1" in facts_text(hot)


def test_the_page_has_every_finding() -> None:
    """docs/troubleshooting.md has one row for each name that the judges use, and no other."""
    code = (ROOT / "planner/machine/findings.py").read_text()
    layers = "driver|device|card|link|host|container|settings|torch"
    used = set(re.findall(rf'"((?:{layers})\.[a-z0-9-]+)"', code))
    page = (ROOT / "docs/troubleshooting.md").read_text()
    rows = re.findall(r"^\| `([a-z]+\.[a-z0-9-]+)` \|", page, re.M)
    assert sorted(rows) == sorted(used)
    assert len(rows) == len(JUDGES) + len(CARD_JUDGES) == 17
    shown = {name for machine in NAMES for _, name in expected(machine)}
    assert shown <= used


def test_this_machine_is_read_and_judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:

    monkeypatch.setattr(torch_build, "ask_torch", lambda _: recorded("a100").torch)
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: 580\nGCC\n")
    facts = read_facts({"NCCL_DEBUG": "INFO", "HOME": "/", "OMP_NUM_THREADS": "1"}, tmp_path)
    assert facts.kernel_module == "NVRM version: 580"
    assert facts.variables == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1"}
    assert facts.system["planner"]
    assert facts.host.num_cpus >= facts.host.usable_cpus >= 1
    assert (facts.host.memory_bytes or 0) > 0
    hangs = replace(facts.torch, failed={"torch.cuda.is_available()": "it took over 120 s"})
    monkeypatch.setattr(torch_build, "ask_torch", lambda _: hangs)
    monkeypatch.setattr("planner.machine.nvml.driver_version", lambda: pytest.fail("it hangs"))
    assert "not asked" in read_facts({}, tmp_path).driver_error


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"machine": {"format": 1}}', "[" * 100000])
def test_what_is_no_machine_of_this_format_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(PlannerError, match=r"a\.json") as refused:
        load_facts(tmp_path / "a.json")
    assert refused.value.way_out


# What a machine gives a training, read from files as a container's and a plain machine's are.
#
# A machine of 16 GiB, of which 8 are available: what files of the kernel say of control groups, the
# processors that may be used so, and GiB in all and free.
GROUPS: dict[str, tuple[dict[str, str], float | None, tuple[float, float]]] = {
    "no limits": ({"cpu.max": "max 100000", "memory.max": "max"}, None, (16, 8)),
    "version 2, the tightest of the groups": (
        {
            "proc/self/cgroup": "0::/pod/box", "pod/cpu.max": "150000 100000",
            "pod/box/cpu.max": "400000 100000", "pod/box/memory.max": f"{12 * GIB}",
        },
        1.5, (12, 8),
    ),
    "cached files are given back": (
        {
            "memory.max": f"{4 * GIB}", "memory.current": f"{3 * GIB}",
            "memory.stat": f"anon 100\ninactive_file {GIB}",
        },
        None, (4, 2),
    ),
    "use is not told": ({"memory.max": f"{4 * GIB}"}, None, (4, 4)),
    "version 1, over its limit": (
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/box\n3:memory:/box",
            "cpu,cpuacct/box/cpu.cfs_quota_us": "200000",
            "cpu,cpuacct/box/cpu.cfs_period_us": "100000",
            "memory/box/memory.limit_in_bytes": f"{4 * GIB}",
            "memory/box/memory.usage_in_bytes": f"{5 * GIB}",
        },
        2.0, (4, 0),
    ),
    "version 1, no limits": (
        {"cpu/cpu.cfs_quota_us": "-1", "memory/memory.limit_in_bytes": "9223372036854771712"},
        None, (16, 8),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("files", "quota", "room"), GROUPS.values(), ids=GROUPS)
def test_control_groups_limit_processors_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str],
    quota: float | None, room: tuple[float, float],
) -> None:  # fmt: skip
    memory = SimpleNamespace(total=16 * GIB, available=8 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    for name, text in files.items():
        path = tmp_path / name if name.startswith("proc") else tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert read_host(tmp_path).quota_cpus == quota
    assert memory_room(tmp_path) == tuple(size * GIB for size in room)


# `planner doctor` on recorded machines: what it prints and keeps, and the status.


def kept(folder: Path, name: str, title: str = "", **changes: Any) -> str:
    """A file as `planner doctor --json` writes it."""
    raw = raw_machine(name)
    for key, value in changes.items():
        raw[key] = {**raw[key], **value} if isinstance(value, dict) else value
    path = folder / f"{title or name}.json"
    path.write_text(json.dumps({"healthy": True, "machine": raw}))
    return str(path)


@pytest.mark.parametrize("name", ["h200", "bad-settings", "driver-too-old"])
def test_a_recorded_machine_is_judged(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    has_faults = any(level == "fault" for level, _ in expected(name))
    assert main(["doctor", kept(tmp_path, name)]) == int(has_faults)
    out = capsys.readouterr().out
    assert ("Something must be fixed first" in out) == has_faults
    assert ("No problems found" in out) == (not expected(name))
    told, _, typed = out.partition("To type")
    assert max(map(len, told.splitlines()[2:])) <= 100
    assert install_line(recorded(name)) in typed


def test_a_machine_without_a_gpu_is_told_so_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = {"shared_memory_bytes": 1 << 33, "container": ""}
    assert main(["doctor", kept(tmp_path, "container-no-gpus", host=host)]) == 0
    told = capsys.readouterr().out.partition("\n\n")[2]
    assert told.startswith(
        "No GPU is visible here: everything would run on the CPU (1 note). Next:"
    )
    assert "planner tune" not in told


def test_json_holds_all_and_is_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", kept(tmp_path, "ecc-errors"), "--json"]) == 1
    first = capsys.readouterr().out
    (tmp_path / "again.json").write_text(first)
    assert main(["doctor", str(tmp_path / "again.json"), "--json"]) == 1
    assert capsys.readouterr().out == first
    found = json.loads(first)
    assert not found["healthy"]
    assert [f["name"] for f in found["findings"]] == ["card.reset", "card.reset"]
    assert all(f["evidence"] and f["cost"] and f["next_step"] for f in found["findings"])
