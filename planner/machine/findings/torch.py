"""The installed torch: does it import, is it for this GPU, has it kernels for it?"""

from __future__ import annotations

from collections.abc import Iterator

from planner.core.torch_version import why_untried
from planner.machine.cuda_support import as_text
from planner.machine.facts import Facts
from planner.machine.findings.driver import what_to_install
from planner.machine.findings.finding import UNKNOWN_COST, Finding
from planner.machine.reading.files import AMD
from planner.machine.torch_build import has_machine_code_for, why_not_usable


def judge_torch(facts: Facts) -> Iterator[Finding]:
    torch = facts.torch
    if torch.error:
        yield Finding(
            "fault", "torch", "torch.import", "torch cannot be imported",
            f"python -c 'import torch': {torch.error}", "no probe and no training runs",
            "See whether nvidia-smi answers, and whether the disk is slow."
            if "took over" in torch.error else "Install torch.",
        )  # fmt: skip
        return
    yield from _unanswered(facts)
    yield from _release(facts)
    if torch.cuda is None and torch.hip is None:
        yield from _cpu_build(facts)
    elif torch.hip is not None:
        yield from _rocm(facts)
    for index in range(len(torch.gpus)):
        yield from _kernels(facts, index)


def _unanswered(facts: Facts) -> Iterator[Finding]:
    failed = facts.torch.failed
    if failed:
        yield Finding(
            "warning", "torch", "torch.unanswered",
            f"torch imports, but failed when asked for {', '.join(failed)}",
            "; ".join(f"{question}: {line}" for question, line in failed.items()),
            "what depends on it was not judged", "Ask it by itself, in a Python that has torch.",
        )  # fmt: skip


def _release(facts: Facts) -> Iterator[Finding]:
    torch = facts.torch
    if said := why_untried(torch.version):
        yield Finding(
            "note", "torch", "torch.release", said,
            "torch.__version__", "estimates may be off by what changed in between",
            "Compare some of them: planner tune.",
        )  # fmt: skip
    if torch.debug:
        yield Finding(
            "warning", "torch", "torch.debug", "this torch was built with DEBUG",
            "torch.version.debug", UNKNOWN_COST, "Build it with DEBUG=0, or install a release.",
        )  # fmt: skip
    elif "git" in torch.version or torch.version.endswith("a0"):
        yield Finding(
            "note", "torch", "torch.source-build",
            f"torch {torch.version} was built from source: which libraries and kernels it has "
            "depends on that build",
            f"torch.__version__; kernels for {', '.join(torch.arch_list) or 'unknown'}", "",
            "Compare it with a released build: planner doctor --compare.",
        )  # fmt: skip


def _cpu_build(facts: Facts) -> Iterator[Finding]:
    if facts.visible:
        yield Finding(
            "fault", "torch", "torch.cpu-build",
            f"torch {facts.torch.version} is built without CUDA, and cannot use "
            f"{facts.visible[0].gpu.name}",
            "torch.version.cuda is None; the driver lists the card",
            "everything runs on the CPU",
            what_to_install(facts, "Update the driver"),
        )  # fmt: skip
    elif any(device.vendor == AMD for device in facts.machine.pci.values()) and (
        "kfd" in facts.machine.device_files
    ):
        yield Finding(
            "fault", "torch", "torch.cpu-build",
            f"torch {facts.torch.version} is built without ROCm, beside an AMD GPU with its driver",
            "torch.version.hip is None; /dev/kfd is there", "everything runs on the CPU",
            "Install torch for ROCm.",
        )  # fmt: skip
    elif facts.machine.smi.is_missing and not facts.is_container and not facts.is_mac:
        yield Finding(
            "note", "torch", "torch.no-gpu", "no GPU was found: probes run on the CPU",
            f"torch {facts.torch.version} (no CUDA), nvidia-smi: "
            f"{facts.machine.smi.error or 'not asked'}", "", "",
        )  # fmt: skip


def _rocm(facts: Facts) -> Iterator[Finding]:
    torch = facts.torch
    yield Finding(
        "note", "torch", "torch.rocm",
        f"this torch is for ROCm {torch.hip}: only what torch tells of the cards was read; the "
        "driver, clocks, power, ECC and links of AMD cards were not",
        "torch.version.hip", "", "See rocm-smi for them.",
    )  # fmt: skip
    if not torch.available:
        yield Finding(
            "fault", "torch", "torch.rocm-no-gpu",
            f"torch for ROCm {torch.hip} can use no GPU here",
            f"torch: {torch.reason or 'it finds none'}; device files: "
            f"{', '.join(facts.machine.device_files) or 'none'}",
            "everything runs on the CPU",
            "In a container pass --device /dev/kfd --device /dev/dri; else see rocminfo.",
        )  # fmt: skip


def _kernels(facts: Facts, index: int) -> Iterator[Finding]:
    torch, gpu = facts.torch, facts.torch.gpus[index]
    capability = as_text(gpu.capability)
    evidence = (
        f"torch.cuda.get_arch_list(): {', '.join(torch.arch_list) or 'nothing'}; {gpu.name} has "
        f"compute capability {capability}"
    )
    why = why_not_usable(torch, index)
    if why is not None:
        name = "torch.cannot-run" if gpu.error and "no code" not in why else "torch.no-kernels"
        yield Finding(
            "fault", "torch", name, f"cuda:{index}: {why}", evidence,
            "nothing runs on that card",
            what_to_install(facts, "Build torch for it") if name == "torch.no-kernels" else
            "See sudo dmesg for 'Xid'; run it again with CUDA_LAUNCH_BLOCKING=1.",
        )  # fmt: skip
    elif torch.cuda and not has_machine_code_for(gpu.capability, torch.arch_list):
        yield Finding(
            "warning", "torch", "torch.ptx-only",
            f"cuda:{index}: this torch has no machine code for {gpu.name}, only PTX, which the "
            "driver compiles when a kernel is first used",
            evidence, "the first start is slower, and kernels tuned for the card are missing; how "
            "much is unknown",
            what_to_install(facts, "Build torch with TORCH_CUDA_ARCH_LIST for it"),
        )  # fmt: skip
