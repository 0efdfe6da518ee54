"""The driver: does it answer, and is it new enough for torch's CUDA?"""

from __future__ import annotations

import re
from collections.abc import Iterator

from planner.machine.cuda_support import (
    NEWEST_TORCH,
    OLDEST_TORCH,
    as_text,
    driver_runs,
    fitting_build,
    minimum_driver,
    parse_version,
)
from planner.machine.facts import Facts
from planner.machine.findings.finding import Finding

_NO_WORK = "no program can use a GPU here"
_REBOOT = "Reboot the machine."
_SAID = 300  # characters of what a failing nvidia-smi printed
# What nvidia-smi prints when it fails (a pattern) -> (name, what it means, the next step).
_FAILURES = (
    (
        "Driver/library version mismatch",
        "driver.mismatch",
        "the driver's library and the module in the kernel are of two versions, as after an update "
        "without a reboot",
        "Reboot, or end what uses the GPU and reload the module: sudo rmmod nvidia_uvm nvidia_drm "
        "nvidia_modeset nvidia && sudo modprobe nvidia.",
    ),
    (
        "Unable to determine the device handle|GPU is lost",
        "driver.gpu-lost",
        "a GPU no longer answers the driver",
        "Look for 'Xid' in the output of sudo dmesg, and reboot. If it comes again: temperature, "
        "power cables, the card's seat.",
    ),
    (
        "couldn't communicate with the NVIDIA driver",
        "driver.not-loaded",
        "the driver's module is not loaded, as after an update of the kernel",
        "sudo modprobe nvidia; if that fails, install the driver again for this kernel.",
    ),
    (
        "No devices were found",
        "driver.no-devices",
        "the driver runs and finds no GPU that it can use",
        "Look for 'NVRM' in the output of sudo dmesg: it says why the card was refused.",
    ),
)


def judge_driver(facts: Facts) -> Iterator[Finding]:
    yield from _answers(facts)
    if facts.log and any("infoROM is corrupted" in line for line in facts.log.warnings):
        yield Finding(
            "warning", "driver", "driver.inforom",
            "the driver says that a card's infoROM is corrupted",
            f"{facts.machine.smi.command}: {facts.log.warnings[0]}",
            "unknown: ECC counts and power limits of that card cannot be trusted",
            "Ask the card's vendor for a replacement, or to write it again.",
        )  # fmt: skip
    if facts.torch.cuda and facts.driver:
        yield from _fits(facts, facts.torch.cuda)
    elif facts.torch.cuda and not facts.torch.available and not facts.cards:
        yield from _unknown_driver(facts)
    if facts.torch.available and facts.torch.cuda and not facts.cards:
        yield _unseen(facts)
    yield from _elsewhere(facts)


def _unseen(facts: Facts) -> Finding:
    capabilities = facts.variables.get("NVIDIA_DRIVER_CAPABILITIES")
    told = f"; NVIDIA_DRIVER_CAPABILITIES={capabilities}" if capabilities else ""
    return Finding(
        "note", "driver", "driver.unseen",
        "torch uses a GPU, and neither nvidia-smi nor the driver's library (NVML) is here to tell "
        "of it",
        f"nvidia-smi: {facts.machine.smi.error or 'no answer'}{told}",
        "the driver, health, clocks, power and links of the cards were not judged, and a probe "
        "cannot see what others hold",
        "In a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility."
        if facts.is_container else "Install nvidia-smi and libnvidia-ml.so of this driver.",
    )  # fmt: skip


def _answers(facts: Facts) -> Iterator[Finding]:
    """Whether nvidia-smi answered; where it is not installed there may still be a GPU."""
    smi = facts.machine.smi
    if smi.is_missing or (facts.log is not None and facts.cards):
        return
    module = facts.machine.kernel_module
    said = smi.error or " ".join(smi.text.split())[:_SAID] or f"status {smi.status}"
    evidence = f"{smi.command}: {said}" + (f"; the kernel's module: {module}" if module else "")
    for pattern, name, meaning, next_step in _FAILURES:
        if re.search(pattern, smi.text):
            yield Finding("fault", "driver", name, meaning, evidence, _NO_WORK, next_step)
            return
    if "answer within" in smi.error:
        yield Finding(
            "fault", "driver", "driver.hangs", "the driver does not answer", evidence, _NO_WORK,
            f"Look for 'Xid' in the output of sudo dmesg. {_REBOOT}",
        )  # fmt: skip
    else:
        yield Finding(
            "fault", "driver", "driver.fails", "nvidia-smi fails", evidence, _NO_WORK,
            "Run nvidia-smi yourself, and see sudo dmesg.",
        )  # fmt: skip


def _fits(facts: Facts, cuda: str) -> Iterator[Finding]:
    needed = minimum_driver(cuda, facts.is_windows)
    evidence = (
        f"driver {facts.driver} ({facts.machine.gpus_from or 'nvidia-smi'}), torch "
        f"{facts.torch.version} for CUDA {cuda} (torch.version.cuda)"
    )
    if driver_runs(facts.driver, cuda, facts.is_windows) is False:
        if facts.torch.available:
            yield Finding(
                "note", "driver", "driver.forward-compatible",
                f"driver {facts.driver} is older than CUDA {cuda} asks for ({needed}), and torch "
                "runs all the same, by NVIDIA's forward compatibility package",
                evidence, "", "",
            )  # fmt: skip
            return
        yield Finding(
            "fault", "driver", "driver.too-old",
            f"torch's CUDA {cuda} needs driver {needed} or newer, and this is {facts.driver}",
            evidence, _NO_WORK, what_to_install(facts, f"Update the driver to {needed} or newer"),
        )  # fmt: skip
    elif not facts.torch.available and not facts.torch.error and facts.visible:
        yield Finding(
            "fault", "driver", "driver.refuses",
            f"torch cannot start CUDA with driver {facts.driver}, although that is new enough",
            f"{evidence}; torch: {facts.torch.reason or 'it finds no GPU'}", _NO_WORK,
            "Look for 'Xid' and 'NVRM' in the output of sudo dmesg, and for an old libcuda.so on "
            "LD_LIBRARY_PATH.",
        )  # fmt: skip
    elif _is_minor_behind(facts.driver_cuda, cuda):
        yield Finding(
            "note", "driver", "driver.minor-version",
            f"the driver is of CUDA {facts.driver_cuda} and torch of {cuda}: they work together, "
            "but the driver cannot compile PTX of the newer one",
            evidence,
            "none for torch's own kernels; a kernel that comes only as PTX fails "
            "(NVIDIA, CUDA Compatibility)",
            f"Update the driver to one of CUDA {cuda} if a kernel fails with 'unsupported "
            "toolchain'.",
        )  # fmt: skip


def _is_minor_behind(driver_cuda: str, cuda: str) -> bool:
    known, wanted = parse_version(driver_cuda), parse_version(cuda)
    return bool(known and wanted) and known[0] == wanted[0] and known[:2] < wanted[:2]


def what_to_install(facts: Facts, otherwise: str) -> str:
    """Which published build of torch works here as the driver is, else `otherwise`."""
    build = fitting_build(
        facts.driver, facts.wanted_capability, facts.torch.version, facts.is_windows
    )
    if build is None:
        low, high = as_text(OLDEST_TORCH), as_text(NEWEST_TORCH)
        return f"{otherwise}: no published build of torch {low} to {high} works with both."
    return f"Install {build}. Or: {otherwise[0].lower()}{otherwise[1:]}."


def _unknown_driver(facts: Facts) -> Iterator[Finding]:
    """torch is built for CUDA and no driver was found: a container's judge may know why."""
    reason = facts.torch.reason
    if "too old" in reason:
        yield Finding(
            "fault", "driver", "driver.too-old",
            f"torch says that the driver is too old for its CUDA {facts.torch.cuda}",
            f"torch: {reason}", _NO_WORK,
            f"Update the driver to {minimum_driver(facts.torch.cuda or '', facts.is_windows)} or "
            "newer, or install torch for an older CUDA.",
        )  # fmt: skip
    elif not facts.is_container and facts.machine.smi.is_missing:
        yield Finding(
            "note", "driver", "driver.none",
            "no NVIDIA driver was found: probes run on the CPU",
            f"nvidia-smi: {facts.machine.smi.error or 'not asked'}; torch: {reason or 'no GPU'}",
            "", "If this machine has an NVIDIA GPU, install its driver.",
        )  # fmt: skip


def _elsewhere(facts: Facts) -> Iterator[Finding]:
    """What does not apply on this system, in one note."""
    evidence = f"system: {facts.machine.system.get('description', 'unknown')}"
    said = None
    if facts.is_wsl:
        said = (
            "driver.wsl",
            "this is WSL2: the driver is that of Windows. Persistence mode, PCIe's state and NUMA "
            "are not told here, and Windows shares the card's memory with its desktop",
            "Update the driver in Windows, and install none inside of WSL.",
        )
    elif facts.is_windows:
        said = (
            "driver.windows",
            "this is Windows: planner estimates here, and searches and probes on Linux only. PCIe, "
            "NUMA, control groups and governors were not read",
            "Use WSL2 to search.",
        )
    elif facts.is_mac:
        said = (
            "driver.macos",
            "this is macOS, which has no CUDA: planner estimates for other machines here. Drivers, "
            "PCIe, NUMA and control groups were not read",
            "",
        )
    if said:
        yield Finding("note", "driver", said[0], said[1], evidence, "", said[2])
