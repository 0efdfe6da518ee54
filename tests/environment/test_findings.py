"""What each layer's judge says where a recorded machine does not show it: one change at a time."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.machine import cuda_support
from planner.machine.cuda_support import (
    driver_runs,
    fitting_build,
    lacking_kernels,
    minimum_driver,
)
from planner.machine.doctor import check_machine
from planner.machine.findings.finding import Finding
from planner.machine.findings.link import transfer_seconds
from planner.machine.machine import Answer, Machine, machine_from_json
from planner.machine.torch_build import TorchBuild
from planner.report.environment import checkup_text
from tests.environment.recorded import NAMES, expected, raw_machine, recorded

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_machine_has_its_findings(name: str) -> None:
    """Those that are written beside it, and no others."""
    found = check_machine(recorded(name)).findings
    assert sorted((finding.level, finding.name) for finding in found) == expected(name)
    assert all(finding.evidence for finding in found)
    assert all(f.cost and f.next_step for f in found if f.level != "note")


def findings(machine: Machine) -> dict[str, Finding]:
    return {finding.name: finding for finding in check_machine(machine).findings}


def changed(name: str, old: str = "", new: str = "", **torch: Any) -> dict[str, Finding]:
    """The findings of a recorded machine after one change of nvidia-smi's answer or of torch's."""
    raw = raw_machine(name)
    assert old in raw["smi"]["text"]
    raw["smi"]["text"] = raw["smi"]["text"].replace(old, new) if old else raw["smi"]["text"]
    raw["torch"] |= torch
    return findings(machine_from_json(raw))


def test_what_to_type_is_for_the_driver_the_card_and_the_container() -> None:
    def commands(name: str, **torch: Any) -> list[str]:
        raw = raw_machine(name)
        raw["torch"] |= torch
        return [command for _, command in check_machine(machine_from_json(raw)).to_type]

    here, build, run = commands("driver-too-old")
    assert here.startswith("pip uninstall --yes torch torchvision && ")
    assert here.endswith(
        '"torch==2.13.*" torchvision --index-url https://download.pytorch.org/whl/cu126'
    )
    arguments = dict(re.findall(r"--build-arg (\w+)=(\S+)", build))
    assert arguments == {"CUDA": "cu126", "TORCH": "2.13"}
    declared = re.findall(r"^ARG (\w+)=", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert set(declared) == set(arguments)
    assert "--gpus all --shm-size=8g --ulimit memlock=-1" in run
    assert commands("h200") == []
    assert commands("h200", error="No module named 'torch'")[0].endswith("/cu130")
    (beside,) = commands("image-other-torch", error="No module named 'torch'")
    assert "--system-site-packages" in beside
    assert commands("laptop-old-driver") == [], "no published build"
    assert commands("rocm", error="No module named 'torch'") == [], "a build for CUDA is no help"
    assert commands("h200", error="importing it took over 60 s") == []


def test_rdma_reaches_a_gpu_by_a_module_or_by_the_open_driver() -> None:
    known = recorded("dgx-a100")  # with InfiniBand

    def found(peermem: bool | None, driver: str, kernel: str = "6.8.0-45-generic") -> bool:
        system = {**known.system, "kernel": kernel}
        machine = replace(known, peermem=peermem, kernel_module=driver, system=system)
        return "link.no-gpudirect" in findings(machine)

    closed, free = "NVIDIA UNIX x86_64 Kernel Module 580", "NVIDIA UNIX Open Kernel Module 580"
    assert found(False, closed)
    assert found(False, free, "5.4.0-generic")
    assert not found(False, free)
    assert not found(True, closed)
    assert not found(None, closed), "an older record"
    assert not found(False, ""), "a container that hides it"


def with_variables(**variables: str) -> dict[str, Finding]:
    return findings(replace(recorded("h200"), variables=variables))


@pytest.mark.parametrize(
    ("torch", "name", "text"),
    [
        ({"error": "ImportError: libcudart"}, "torch.import", ""),
        ({"version": "2.4.1"}, "torch.release", "2.9 to 2.15; this is 2.4.1"),
        ({"arch_list": ["sm_80"]}, "torch.no-kernels", "no code for NVIDIA H200"),
        ({"arch_list": ["compute_90"]}, "torch.ptx-only", "only PTX"),
        ({"version": "2.9.0a0+145a3a7bda.nv25.10"}, "torch.release", "nv25.10, a pre-release"),
        ({"version": "2.13.0+git1234567"}, "torch.source-build", "from source"),
        (
            {"failed": {"cublasGetProperty": "it ended with status -11"}},
            "torch.unanswered",
            "asked for cublasGetProperty",
        ),
        ({"available": False, "gpus": [], "reason": "no"}, "driver.refuses", "cannot start CUDA"),
    ],
)
def test_torch_beside_a_good_driver(torch: dict[str, Any], name: str, text: str) -> None:
    found = changed("h200", **torch)
    assert list(found) == [name]
    assert text in found[name].message


@pytest.mark.parametrize(
    ("old", "new", "name", "level"),
    [
        ("<compute_mode>Default", "<compute_mode>Exclusive_Process", "card.exclusive", "note"),
        ("<reset_required>No", "<reset_required>Yes", "card.reset", "fault"),
        ("<gpu_recovery_action>None", "<gpu_recovery_action>Reboot", "card.reset", "fault"),
        ("<gpu_temp>40 C", "<gpu_temp>[GPU is lost]", "card.reset", "fault"),
        ("<gpu_temp>40 C", "<gpu_temp>[Unknown Error]", "card.unanswered", "note"),
        ("<pending_retirement>N/A", "<pending_retirement>Yes", "card.reset-pending", "fault"),
        ("slowdown>Not Active</clocks_event_reason_hw_slowdown>",
         "slowdown>Active</clocks_event_reason_hw_slowdown>", "card.throttled", "warning"),
        ("power_cap>Not Active", "power_cap>Active", None, ""),
        ("<current_link_gen>5", "<current_link_gen>1", "link.generation", "warning"),
        ("<max_host_link_gen>5", "<max_host_link_gen>4", "link.host-generation", "note"),
        ("</nvidia_smi_log>", "</nvidia_smi_log>\nWARNING: infoROM is corrupted at gpu 0000:01:00",
         "driver.inforom", "warning"),
    ],
)  # fmt: skip
def test_one_answer_of_the_driver(old: str, new: str, name: str | None, level: str) -> None:
    found = changed("h200", old, new)
    assert [(f.name, f.level) for f in found.values()] == ([(name, level)] if name else [])


def test_a_card_that_others_use_names_them() -> None:
    raw = raw_machine("h200")
    raw["gpus"][0]["used_bytes"] = 70_000 << 20
    raw["smi"]["text"] = raw["smi"]["text"].replace(
        "<processes>",
        "<processes><process_info><pid>4242</pid><type>C</type><process_name>python</process_name>"
        "<used_memory>69000 MiB</used_memory></process_info>",
    )
    found = findings(machine_from_json(raw))
    assert list(found) == ["card.busy"]
    assert "python (4242, 67.38 GiB)" in found["card.busy"].evidence


@pytest.mark.parametrize(
    ("variables", "name", "level"),
    [
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "settings.launch-blocking", "fault"),
        ({"CUDA_LAUNCH_BLOCKING": "0"}, None, ""),
        ({"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}, "settings.tf32-on", "note"),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "settings.no-caching", "fault"),
        ({"PYTORCH_ALLOC_CONF": "a", "PYTORCH_CUDA_ALLOC_CONF": "a"},
         "settings.allocator-options", "warning"),
        ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, "settings.cublas-workspace", "note"),
        ({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, "settings.cublas-workspace", "warning"),
    ],
)  # fmt: skip
def test_variables(variables: dict[str, str], name: str | None, level: str) -> None:
    found = with_variables(**variables)
    assert [(f.name, f.level) for f in found.values()] == ([(name, level)] if name else [])


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"versions": {"torch": "2.13.0+cu130", "torchvision": "0.28.0+cpu", "triton": "3"}},
         "libraries.torchvision-cuda"),
        ({"versions": {"torch": "2.12.0+cu130", "torchvision": "0.28.0", "triton": "3"}},
         "libraries.torchvision-release"),
        ({"versions": {"torch": "2.13.0+cu130"}}, "libraries.no-triton"),
        ({"versions": {"torch": "2.13.0+cu130", "pytorch-triton": "3"}}, None),
        ({"versions": {"timm": "1.0", "triton": "3"}, "import_errors": {"timm": "ImportError: x"}},
         "libraries.timm-import"),
        ({"import_errors": {"torchvision": "RuntimeError: operator torchvision::nms does not "
                            "exist", "timm": "RuntimeError: operator torchvision::nms"}},
         "libraries.torchvision-import"),
    ],
)  # fmt: skip
def test_libraries(changes: dict[str, Any], name: str | None) -> None:
    assert list(findings(replace(recorded("h200"), **changes))) == ([name] if name else [])


@pytest.mark.parametrize(
    ("changes", "name", "level"),
    [
        ({"shared_memory_bytes": 512 << 20}, "container.shared-memory", "warning"),
        ({"shared_memory_bytes": 64 << 20}, "container.shared-memory", "fault"),
        ({"governor": "powersave"}, None, ""),  # intel_pstate governs itself
        ({"quota_cpus": 64.0}, None, ""),
    ],
)
def test_the_host(changes: dict[str, Any], name: str | None, level: str) -> None:
    machine = recorded("h200")
    found = findings(replace(machine, host=replace(machine.host, **changes)))
    assert [(f.name, f.level) for f in found.values()] == ([(name, level)] if name else [])


@pytest.mark.parametrize(
    ("smi", "name"),
    [
        (Answer("nvidia-smi -q -x", "NVIDIA-SMI has failed because it couldn't communicate with "
                "the NVIDIA driver.", 9), "driver.not-loaded"),
        (Answer("nvidia-smi -q -x", "No devices were found\n", 6), "driver.no-devices"),
        (Answer("nvidia-smi -q -x", "Segmentation fault", 139), "driver.fails"),
        (Answer("nvidia-smi -q -x", "<nvidia_smi_log><gpu", 0), "driver.fails"),
    ],
)  # fmt: skip
def test_nvidia_smi_that_fails(smi: Answer, name: str) -> None:
    torch = TorchBuild("2.13.0+cu130", cuda="13.0", reason="CUDA initialization failed")
    machine = replace(recorded("driver-mismatch"), smi=smi, torch=torch)
    found = findings(replace(machine, kernel_module="", versions={"triton": "3"}))
    assert found[name].level == "fault"
    assert found[name].next_step
    assert smi.text.split()[0] in found[name].evidence


@pytest.mark.parametrize(
    ("driver", "cuda", "windows", "runs"),
    [
        ("525.60.13", "12.6", False, True),
        ("525.60.11", "12.6", False, False),
        ("527.41", "12.6", True, False),
        ("528.33", "12.6", True, True),
        ("575.57.08", "13.0", False, False),
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
        ("570.133.20", (8, 0), "2.13.0", "torch 2.13 for CUDA 12.6 (cu126)"),
        ("570.133.20", (12, 0), "2.13.0", "torch 2.11 for CUDA 12.8 (cu128)"),  # 12.6 has none
        ("570.133.20", (7, 0), "2.10.0", "torch 2.10 for CUDA 12.8 (cu128)"),
        ("580.95.05", (3, 5), "2.13.0", None),
        ("470.82.01", (8, 0), "2.13.0", None),
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
        (
            "13.0",
            (6, 1),
            "has no kernels for compute capability 6.1: install torch 2.14 for CUDA 12.6",
        ),
        (
            "12.6",
            (12, 0),
            "has no kernels for compute capability 12.0: install torch 2.14 for CUDA 13",
        ),
        ("12.6", (6, 1), None),
        ("13.0", (9, 0), None),
        ("", (6, 1), None),  # a build for the CPU, or none
        ("13.0", None, None),  # AMD
    ],
)
def test_a_card_without_kernels_in_the_installed_torch_is_told(
    monkeypatch: pytest.MonkeyPatch, cuda: str, card: tuple[int, int] | None, said: str | None
) -> None:
    assert cuda_support._installed_cuda() == (torch.version.cuda or "")
    monkeypatch.setattr(cuda_support, "installed_torch", lambda: "2.14.1")
    monkeypatch.setattr(cuda_support, "_installed_cuda", lambda: cuda)
    found = lacking_kernels(card)
    assert found is said is None or (said is not None and said in str(found))


def test_a_link_carries_what_its_lanes_carry() -> None:
    # 128 × 3 × 224² × 4 B = 77,070,336 B over 4 lanes of 985 MB/s.
    assert transfer_seconds(3, 4) == pytest.approx(77_070_336 / 3.94e9)
    assert transfer_seconds(None, 4) is None


@pytest.mark.parametrize(
    ("affinity", "name"),
    [
        ("48-95,144-191", "numa.far"),
        ("24-71", "numa.unbound"),
        ("0-191", "numa.unbound"),
        ("0-47", None),
        ("", None),
    ],
)
def test_numa_nodes_against_the_affinity(affinity: str, name: str | None) -> None:
    """GPU 0 is at the node of CPUs 0-47 and 96-143; the other is hidden."""
    machine = replace(
        recorded("numa-far"), affinity=affinity, variables={"CUDA_VISIBLE_DEVICES": "0"}
    )
    assert list(findings(machine)) == ([name] if name else [])


def test_faults_come_first_and_say_everything() -> None:
    text = checkup_text(check_machine(recorded("bad-settings")))
    levels = re.findall(r"^(fault|warning|note):", text, re.MULTILINE)
    assert levels == sorted(levels, key=["fault", "warning", "note"].index)
    assert text.index("  read  ") < text.index("  cost  ") < text.index("  next  ")


def test_the_page_has_every_finding() -> None:
    """docs/troubleshooting.md has one row for each name that the judges use, and no other."""
    used = set()
    for path in (ROOT / "planner/machine/findings").glob("*.py"):
        layers = "driver|card|link|numa|torch|libraries|settings|container|host"
        used |= set(re.findall(rf'"((?:{layers})\.[a-z0-9-]+)"', path.read_text()))
    used -= {"libraries.x"}
    used |= {"libraries.torchvision-import", "libraries.timm-import"}  # named by the package
    rows = re.findall(
        r"^\| `([a-z]+\.[a-z0-9-]+)` \|", (ROOT / "docs/troubleshooting.md").read_text(), re.M
    )
    assert sorted(rows) == sorted(used)
    shown = {name for machine in NAMES for _, name in expected(machine)}
    assert shown <= used
