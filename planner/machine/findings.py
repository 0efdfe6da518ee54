"""What keeps a training from running, or from running fast: the judges of a machine's facts.

Each judge yields findings of one name; docs/troubleshooting.md has a row for each name.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from planner.core.errors import PlannerError, alternatives
from planner.core.units import GIB, MIB, format_bytes
from planner.machine import torch_build
from planner.machine.doctor import Card, MachineFacts
from planner.machine.hardware.gpu import DISTURBING_REASONS
from planner.memory.allocator_config import VARIABLES as ALLOCATOR_VARIABLES
from planner.memory.allocator_config import parse_allocator_config

Level = Literal["fault", "warning", "note"]
LEVELS: tuple[Level, ...] = ("fault", "warning", "note")  # worst first
Findings = Iterator["Finding"]

UNKNOWN = "unknown: it was not measured"
NO_GPU = "everything runs on the CPU"
# The share of a card's memory that others may hold without a warning. A judgement.
_BUSY_SHARE = 0.05
_WITHOUT_P2P = (
    "copies pass through the host's memory: four RTX 4090 sum at 13 GB/s without P2P and at 26 "
    "with it (tinygrad/open-gpu-kernel-modules#22, #36)"
)
# Docker's default for /dev/shm (its reference of "docker run": --shm-size, 64m).
_DOCKER_SHARED_BYTES = 64 * MIB
_PASSING = {
    "podman": "start it with --device nvidia.com/gpu=all",
    "apptainer": "start it with --nv",
    "kubepods": "ask for the GPU in the pod: resources.limits, nvidia.com/gpu: 1",
    "lxc": "pass the device files of /dev/nvidia* into it",
}


@dataclass(frozen=True)
class Finding:
    """Something worth knowing of a machine.

    Levels: a `fault` keeps training from running, or its results cannot be trusted; with a
    `warning` it is slower or smaller than it could be; a `note` is worth knowing. `evidence` is
    what was read and where, `cost` what the finding costs (with a source, derived, or unknown),
    `next_step` what to type or to do. `subject` is the card that `message` is about; "" for none.
    """

    level: Level
    name: str
    message: str
    evidence: str
    cost: str
    next_step: str
    subject: str = ""


def judge(facts: MachineFacts) -> list[Finding]:
    """All findings, the worst first."""
    findings = [finding for judge_machine in JUDGES for finding in judge_machine(facts)]
    for card in facts.cards:
        of_card = (finding for judge_card in CARD_JUDGES for finding in judge_card(card))
        findings += [replace(finding, subject=facts.title(card)) for finding in of_card]
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def _driver(facts: MachineFacts) -> Findings:
    torch, driver, cuda = facts.torch, facts.driver, facts.torch.cuda or ""
    needed = torch_build.minimum_driver(cuda, facts.is_windows)
    too_old = torch_build.driver_runs(driver, cuda, facts.is_windows) is False or (
        not driver and "too old" in torch.reason
    )
    if too_old and not torch.available:  # else by NVIDIA's forward compatibility package
        yield Finding(
            "fault", "driver.too-old",
            f"torch's CUDA {cuda} needs driver {needed} or newer, and this is "
            f"{driver or 'an older one'}",
            f"NVML: driver {driver or 'unknown'}; torch.version.cuda: {cuda}; torch: "
            f"{torch.reason or 'it can use no GPU'}",
            NO_GPU, what_to_install(facts, f"Update the driver to {needed} or newer"),
        )  # fmt: skip


def what_to_install(facts: MachineFacts, otherwise: str) -> str:
    """The step that installs a published build of torch for this driver; else `otherwise`."""
    build = torch_build.fitting_build(
        facts.driver, facts.capability, facts.torch.version, facts.is_windows
    )
    if build is None:
        low, high = (
            torch_build.version_text(torch_build.OLDEST_TORCH),
            torch_build.version_text(torch_build.NEWEST_TORCH),
        )
        return f"{otherwise}: no published build of torch {low} to {high} works on this machine."
    return f"Install {build}. Or: {otherwise[0].lower()}{otherwise[1:]}."


_SILENT = (
    ("version mismatch", "Reboot: the driver was updated, and the kernel still has the old one."),
    ("Not Loaded", "sudo modprobe nvidia; if that fails, install the driver again for this "
     "kernel."),
    ("", "sudo dmesg | grep -E 'NVRM|Xid' says why; then reboot."),
)  # fmt: skip


def _device(facts: MachineFacts) -> Findings:
    torch, name = facts.torch, "device.none"
    hidden = facts.variables.get("CUDA_VISIBLE_DEVICES", "")
    if facts.driver_error:
        step = next(step for sign, step in _SILENT if sign in facts.driver_error)
        yield Finding(
            "fault", name, f"the driver, or a GPU, does not answer: {facts.driver_error}",
            f"NVML: {facts.driver_error}; the kernel's module: {facts.kernel_module or 'not seen'}",
            "no program can use that GPU", step,
        )  # fmt: skip
    elif facts.cards and not facts.visible:
        yield Finding(
            "fault", name, f"CUDA_VISIBLE_DEVICES={hidden} hides every GPU of this machine",
            f"environment; NVML lists {len(facts.cards)}", NO_GPU, "unset CUDA_VISIBLE_DEVICES",
        )  # fmt: skip
    elif torch.hip and not torch.available:
        yield Finding(
            "fault", name, f"torch for ROCm {torch.hip} can use no GPU here",
            f"torch: {torch.reason or 'it finds none'}", NO_GPU,
            "In a container pass --device /dev/kfd --device /dev/dri; else see rocminfo.",
        )  # fmt: skip
    elif (
        torch.cuda and facts.cards and not torch.available and not torch.error
        and torch_build.driver_runs(facts.driver, torch.cuda, facts.is_windows) is not False
    ):  # fmt: skip
        why = torch.reason or "; ".join(torch.failed.values()) or "it finds no GPU"
        yield Finding(
            "fault", name, f"torch cannot start CUDA, although driver {facts.driver} is new enough",
            f"torch: {why}", NO_GPU,
            "sudo dmesg | grep -E 'NVRM|Xid'; and take an old libcuda.so off LD_LIBRARY_PATH.",
        )  # fmt: skip
    elif not (
        facts.cards or torch.available or torch.error or facts.container
        or "too old" in torch.reason
    ):  # fmt: skip
        yield Finding(
            "note", name, "no GPU was found", f"NVML; torch: {torch.reason or 'none'}", NO_GPU,
            "If this machine has one, install its driver.",
        )  # fmt: skip


def _mig(card: Card) -> Findings:
    if card.gpu.is_split:
        index, evidence = card.gpu.index, "NVML: MIG mode is on"
        if card.instances == 0:
            yield Finding(
                "fault", "card.mig", "is in MIG mode and has no instance", evidence,
                "CUDA sees no device on this card",
                f"sudo nvidia-smi -i {index} -mig 0 ends it; sudo nvidia-smi mig -i {index} "
                "-lgip lists the sizes of instances, and -cgi ID -C makes one.",
            )  # fmt: skip
        else:
            yield Finding(
                "note", "card.mig", f"is split into {card.instances or 'some'} MIG instances",
                evidence, "an instance has its share of the memory and of the multiprocessors",
                "export CUDA_VISIBLE_DEVICES=MIG-…, of those that nvidia-smi -L lists.",
            )  # fmt: skip


def _reset(card: Card) -> Findings:
    """What to do is from NVIDIA, GPU Memory Error Management."""
    evidence = "NVML: ECC, remapped rows, retired pages, recovery action"
    if card.remap_failed:
        yield Finding(
            "fault", "card.reset", "could not replace a broken row of its memory", evidence,
            "wrong or aborted programs: the card is due for exchange", "Have the card exchanged.",
        )  # fmt: skip
    signs = {
        f"had {card.ecc_errors} uncorrectable memory errors since the driver was loaded":
            card.ecc_errors,
        "has found broken memory, and takes it out of use at its reset": card.reset_pending,
        f"needs {card.recovery}, says its driver": card.recovery,
    }  # fmt: skip
    for what in filter(signs.get, signs):
        yield Finding(
            "fault", "card.reset", what, evidence, "a program that meets it is ended",
            f"sudo nvidia-smi --gpu-reset -i {card.gpu.index}; if that is refused, reboot; if it "
            "comes again, have the card exchanged.",
        )  # fmt: skip


def _busy(card: Card) -> Findings:
    used, total = card.gpu.used_bytes or 0, card.gpu.total_bytes or 0
    if used > _BUSY_SHARE * total > 0:
        pids = ", ".join(str(holder.pid) for holder in card.holders)
        yield Finding(
            "warning", "card.busy",
            f"has {format_bytes(used)} of {format_bytes(total)} in use by other processes",
            f"NVML: {f'processes {pids}' if pids else 'no process is named'}",
            "that memory, and their share of the time: measurements beside them are not reliable",
            "End them, or export CUDA_VISIBLE_DEVICES=N for another card.",
        )  # fmt: skip


def _throttled(card: Card) -> Findings:
    reasons = [reason for reason in DISTURBING_REASONS if reason in card.reasons]
    if reasons:
        clock, max_clock, cost = card.sm_mhz, card.max_sm_mhz, UNKNOWN
        if clock and max_clock and not card.is_resting:
            cost = f"up to {1 - clock / max_clock:.0%} of what is bound by computing, by the clocks"
        yield Finding(
            "warning", "card.throttled", f"is slowed: {DISTURBING_REASONS[reasons[0]]}",
            f"NVML: {', '.join(reasons)}; {clock} of {max_clock} MHz", cost,
            "Check fans, dust, air and power cables; nvidia-smi -q -d PERFORMANCE tells it again.",
        )  # fmt: skip


def _power(card: Card) -> Findings:
    limit, default = card.watts, card.default_watts
    if limit and default and limit < 0.99 * default:
        yield Finding(
            "warning", "card.power-limit",
            f"is limited to {limit:g} W, and its default is {default:g} W",
            "NVML: enforced and default power limit",
            "lower clocks under full load; how much depends on the model",
            f"sudo nvidia-smi -i {card.gpu.index} -pl {default:g}, if cooling and supply allow it.",
        )  # fmt: skip


def _pcie(card: Card) -> Findings:
    """A card at rest lowers the generation of its link, so that only a busy one's is judged."""
    generation, max_generation = card.generation or 0, card.max_generation or 0
    has_fewer_lanes = bool(card.lanes and card.max_lanes and card.lanes < card.max_lanes)
    is_slower = 0 < generation < max_generation and not card.is_resting
    if has_fewer_lanes or is_slower:
        at = generation if is_slower else max_generation
        yield Finding(
            "note" if card.is_virtual else "warning", "link.pcie",
            f"works over {card.lanes} lanes of PCIe {at or '?'}, and "
            f"{card.max_lanes} of PCIe {max_generation or '?'} are possible",
            "NVML: PCIe link's width and generation, now and at most",
            "copies to the card take longer in proportion; the step itself does not",
            "Nothing from inside this virtual machine; another kind may have more."
            if card.is_virtual else
            "Seat the card again in a slot of 16 lanes, without a riser, and see whether the "
            "board shares the slot's lanes; sudo lspci -vv | grep LnkSta shows them.",
        )  # fmt: skip


def _p2p(facts: MachineFacts) -> Findings:
    visible = {card.gpu.index for card in facts.visible}
    pairs = {
        (a.gpu.index, b): why
        for a in facts.visible
        for b, why in a.no_p2p.items()
        if b in visible and a.gpu.index < b
    }
    if pairs:
        by_card = set(pairs.values()) == {"the GPU does not support it"}
        yield Finding(
            "warning", "link.no-p2p", f"{len(pairs)} pairs of GPUs cannot read each other's memory",
            f"NVML: {'; '.join(sorted(set(pairs.values())))}", _WITHOUT_P2P,
            "Nothing with NVIDIA's driver: let fewer gradients cross (accumulate, no_sync)."
            if by_card else "Turn the IOMMU (VT-d, AMD-Vi) and ACS off in the board's settings; "
            "sudo lspci -vvv | grep ACSCtl shows it (NCCL, Troubleshooting).",
        )  # fmt: skip


def _nvlink(facts: MachineFacts) -> Findings:
    """A card without any NVLink up may have no bridge, which is no fault."""
    cards = facts.visible if len(facts.visible) > 1 else []
    for card in (card for card in cards if card.nvlinks_up and card.nvlinks_down):
        yield Finding(
            "warning", "link.nvlink-down",
            f"has {card.nvlinks_down} of {card.nvlinks_up + card.nvlinks_down} NVLinks down",
            "NVML: the state of each link",
            "all-reduce is slower in proportion, or NCCL takes another way",
            "Seat the bridge or card again, or sudo systemctl start nvidia-fabricmanager where "
            "there is NVSwitch; sudo dmesg | grep 'Xid.*: 74' tells errors of a link.",
            facts.title(card),
        )  # fmt: skip


def _shared_memory(facts: MachineFacts) -> Findings:
    size = facts.host.shared_memory_bytes
    if size is not None and size < GIB:
        yield Finding(
            "fault" if size <= _DOCKER_SHARED_BYTES else "warning", "host.shared-memory",
            f"/dev/shm has {format_bytes(size)}: workers of a DataLoader hand over batches in it",
            "statvfs of /dev/shm; 64 MiB is the default of Docker",
            "workers are ended by a bus error when it is full; "
            f"a batch of 128 fp32 pictures of 224 px is {format_bytes(128 * 3 * 224 * 224 * 4)}",
            "docker run --shm-size=8g (in Kubernetes an emptyDir of medium Memory at /dev/shm)."
            if facts.container else "sudo mount -o remount,size=8G /dev/shm",
        )  # fmt: skip


def _quota(facts: MachineFacts) -> Findings:
    quota, sees = facts.host.quota_cpus, facts.host.usable_cpus
    if quota is not None and quota < sees:
        fair = max(1, int(quota))
        yield Finding(
            "warning", "host.quota",
            f"this process may use the time of {quota:g} processors, and sees {sees}",
            "cpu.max of its control group",
            "what starts a thread for each processor is stopped for most of every period; how much "
            "is unknown",
            f"export OMP_NUM_THREADS={fair}, and at most {fair} workers; or docker run --cpus, "
            "resources.limits.cpu.",
        )  # fmt: skip


def _container(facts: MachineFacts) -> Findings:
    torch, variables, name = facts.torch, facts.variables, "container.gpu"
    if not facts.container:
        return
    if torch.available and torch.cuda and not facts.cards:
        value = variables.get("NVIDIA_DRIVER_CAPABILITIES", "not set")
        yield Finding(
            "warning", name, "torch uses a GPU, and the driver's library (NVML) is not in here to "
            "tell of it", f"NVML is missing; NVIDIA_DRIVER_CAPABILITIES: {value}",
            "health, clocks, power and links of the cards were not judged, and a probe cannot see "
            "what others hold", "docker run -e NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        )  # fmt: skip
    elif not facts.cards and not torch.available and not torch.hip:
        signs = []
        if facts.kernel_module:
            signs.append("the kernel has NVIDIA's module (/proc/driver/nvidia/version)")
        if variables.get("NVIDIA_VISIBLE_DEVICES"):
            signs.append("the image is made for one (NVIDIA_VISIBLE_DEVICES)")
        passing = _PASSING.get(facts.container, "start it with docker run --gpus all")
        yield Finding(
            "fault" if signs else "note", name,
            "this container was started without a GPU" if signs else "this container sees no GPU",
            f"{facts.container}; NVML finds no card"
            + (f", but {alternatives(signs, 'and')}" if signs else ""),
            NO_GPU, f"If the host has one: {passing}. The host needs NVIDIA's container toolkit.",
        )  # fmt: skip


def _allocator(facts: MachineFacts) -> Findings:
    variables, name = facts.variables, "settings.allocator"
    given = [v for v in ALLOCATOR_VARIABLES if variables.get(v)]
    if len(given) == 2 and variables[given[0]] != variables[given[1]]:
        yield Finding(
            "fault", name, f"{given[0]} and {given[1]} differ, and torch reads only the first",
            "; ".join(f"{v}={variables[v]}" for v in given),
            "the options that you think are in force are not", f"unset {given[0]}",
        )  # fmt: skip
    if given:
        try:
            parse_allocator_config(variables[given[0]])
        except PlannerError as error:
            yield Finding(
                "warning", name, f"estimates do not hold with this {given[0]}: "
                f"{error.message.rstrip('.')}", f"{given[0]}={variables[given[0]]}",
                "the estimate's reserved memory is of torch's own allocator", f"unset {given[0]}",
            )  # fmt: skip


class Switch(NamedTuple):
    """A variable that should not be set to what `values` matches."""

    variable: str
    values: str
    level: Level
    does: str
    cost: str
    of_several: bool = False


_ON = r"(?!0?$).*"  # torch's and NCCL's: anything but 0
# NVIDIA: NCCL's user guide, Environment Variables; cuBLAS, Results reproducibility. PyTorch: CUDA
# Environment Variables.
SWITCHES = (
    Switch("PYTORCH_NO_CUDA_MEMORY_CACHING", _ON, "fault", "turns the allocator's cache off",
           "every tensor is asked of the driver, which waits for the device"),
    Switch("CUDA_LAUNCH_BLOCKING", _ON, "fault", "makes every kernel wait",
           "the host no longer runs ahead: its time adds to the device's"),
    Switch("CUBLAS_WORKSPACE_CONFIG", ":16:8", "warning",
           "leaves cuBLAS 128 KiB, without the kernels that need more", UNKNOWN),
    Switch("CUDNN_CONV_WSCAP_DBG", ".+", "warning", "caps the workspace of a convolution, in MiB",
           f"convolutions that need more take slower kernels: {UNKNOWN}"),
    Switch("TORCH_CUDNN_V8_API_DISABLED", _ON, "warning",
           "makes torch use cuDNN's old interface", UNKNOWN),
    Switch("NVIDIA_TF32_OVERRIDE", "0", "warning", "turns tf32 off in cuDNN and cuBLAS",
           "precision tf32 runs as fp32: on an A100 at 19.5 and not 156 TFLOP/s (its datasheet)"),
    Switch("NCCL_P2P_DISABLE", _ON, "warning", "keeps NCCL from P2P, NVLink included",
           _WITHOUT_P2P, of_several=True),
    Switch("NCCL_P2P_LEVEL", "LOC|0", "warning", "keeps NCCL from P2P, NVLink included",
           _WITHOUT_P2P, of_several=True),
    Switch("NCCL_SHM_DISABLE", _ON, "warning",
           "keeps NCCL from shared memory: GPUs without P2P use the network", UNKNOWN,
           of_several=True),
    Switch("NCCL_IB_DISABLE", _ON, "warning", "keeps NCCL from InfiniBand and RoCE",
           "between machines NCCL uses TCP: at 100 Gbit/s 4 to 6 GB/s, not 12 (NVIDIA/nccl#450, "
           "NVIDIA/nccl-tests#29)", of_several=True),
)  # fmt: skip


def _switches(facts: MachineFacts) -> Findings:
    for variable, values, level, does, cost, of_several in SWITCHES:
        said = facts.variables.get(variable, "")
        if re.fullmatch(values, said) and (len(facts.visible) > 1 or not of_several):
            yield Finding(
                level, "settings.variable", f"{variable}={said} {does}", "environment", cost,
                f"unset {variable}",
            )  # fmt: skip


def _torch(facts: MachineFacts) -> Findings:
    torch, name = facts.torch, "torch.build"
    if torch.error:
        yield Finding(
            "fault", name, "torch cannot be imported", f"python -c 'import torch': {torch.error}",
            "no probe and no training runs",
            "See whether nvidia-smi answers, and whether the disk is slow."
            if "took over" in torch.error
            else "pip install torch" if torch.is_missing
            else "pip install --force-reinstall torch",
        )  # fmt: skip
        return
    if torch.cuda is None and torch.hip is None and (facts.visible or facts.has_amd_driver):
        card = facts.visible[0].gpu.name if facts.visible else "an AMD GPU (/dev/kfd)"
        yield Finding(
            "fault", name, f"torch {torch.version} is built for the CPU, beside {card}",
            "torch.version.cuda and torch.version.hip are None", NO_GPU,
            what_to_install(facts, "Update the driver")
            if facts.visible else "Install torch for ROCm.",
        )  # fmt: skip
    for index, gpu in enumerate(torch.gpus):
        evidence = f"torch.cuda.get_arch_list(): {', '.join(torch.arch_list) or 'nothing'}"
        if why := torch_build.why_not_usable(torch, index):
            yield Finding(
                "fault", name, f"cuda:{index}: {why}", evidence, "nothing runs on that card",
                what_to_install(facts, "Build torch for it") if "no code" in why else
                "CUDA_LAUNCH_BLOCKING=1 python train.py names the kernel; sudo dmesg | grep Xid.",
            )  # fmt: skip
        elif torch.cuda and not torch_build.has_machine_code_for(gpu.capability, torch.arch_list):
            yield Finding(
                "warning", name, f"cuda:{index}: this torch has only PTX for {gpu.name}", evidence,
                "the driver compiles each kernel at its first use, and those tuned for the card "
                f"are missing: {UNKNOWN}",
                what_to_install(facts, "Build torch with TORCH_CUDA_ARCH_LIST for it"),
            )  # fmt: skip
    if torch.failed:
        yield Finding(
            "warning", name, f"torch failed when asked for {', '.join(torch.failed)}",
            "; ".join(torch.failed.values()), "what depends on it was not judged",
            "Run that by itself in a Python that has torch: it prints the whole error.",
        )  # fmt: skip


def _cudnn(facts: MachineFacts) -> Findings:
    torch = facts.torch
    if torch.cuda and not torch.error and torch.cudnn_error:
        path = facts.variables.get("LD_LIBRARY_PATH", "not set")
        yield Finding(
            "fault", "torch.cudnn", "torch cannot use the cuDNN that it finds",
            f"torch.backends.cudnn.version(): {torch.cudnn_error}; LD_LIBRARY_PATH: {path}",
            "convolutions fail", "unset LD_LIBRARY_PATH: torch brings its own cuDNN.",
        )  # fmt: skip
    elif torch.cuda and not torch.error and not torch.cudnn and not torch.failed:
        yield Finding(
            "warning", "torch.cudnn", "this torch has no cuDNN, like some source builds",
            "torch.backends.cudnn.version() is None",
            f"convolutions run on torch's own kernels: {UNKNOWN}",
            "Install a released build, or build it with USE_CUDNN=1.",
        )  # fmt: skip


JUDGES: tuple[Callable[[MachineFacts], Findings], ...] = (
    _driver, _device, _p2p, _nvlink, _shared_memory, _quota, _container, _allocator, _switches,
    _torch, _cudnn,
)  # fmt: skip
CARD_JUDGES: tuple[Callable[[Card], Findings], ...] = (
    _mig, _reset, _busy, _throttled, _power, _pcie,
)  # fmt: skip
