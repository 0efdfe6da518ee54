"""The facts of a machine, as `planner doctor` reads them: from the driver's library (NVML), from
files of /proc, and from a process that asks torch.

`planner.machine.findings` judges them. So a machine that somebody recorded is judged as this one
is.
"""

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pynvml

from planner import __version__
from planner.core.errors import UsageError
from planner.core.files import MAX_RESULT_BYTES, parse_json, read_text
from planner.core.torch_version import installed_version
from planner.machine import nvml, torch_build
from planner.machine.hardware.gpu import DetectedGpu, recognise_gpu, visible_gpus
from planner.machine.host import ROOT, Host, read_host, text_of
from planner.machine.nvml import NvmlDevice, NvmlProcess
from planner.memory.allocator_config import VARIABLES as ALLOCATOR_VARIABLES

FACTS_FORMAT = 2  # 1 held the texts of nvidia-smi
_WAY_OUT = "Write it with 'planner doctor --json' of this version of planner, on that machine."

PACKAGES = (
    "optuna", "timm", "torchvision", "transformers", "accelerate", "lightning", "deepspeed",
    "triton",
)  # fmt: skip
VARIABLES = (
    *ALLOCATOR_VARIABLES, "PYTORCH_NO_CUDA_MEMORY_CACHING", "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE",
    "CUDNN_CONV_WSCAP_DBG", "TORCH_CUDNN_V8_API_DISABLED", "LD_LIBRARY_PATH", "OMP_NUM_THREADS",
    "KUBERNETES_SERVICE_HOST", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES",
    "NVIDIA_PYTORCH_VERSION",
)  # fmt: skip
_PREFIX = "NCCL_"

# nvmlGpuP2PStatus_t and nvmlDeviceGpuRecoveryAction_t of nvml.h.
_NO_P2P = {
    1: "the chipset does not support it", 2: "the GPU does not support it",
    3: "the topology does not support it", 4: "it is disabled in the driver's registry",
    5: "it is not supported",
}  # fmt: skip
_RECOVERIES = {
    1: "a reset", 2: "a reboot", 3: "an end of P2P", 4: "a drain and a reset",
    5: "a recovery of its IMEX domain", 6: "a reset of its bus", 7: "a reboot",
}  # fmt: skip
_RECOVERY_FIELD = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, which older pynvml do not name
_READ = 0  # NVML_P2P_CAPS_INDEX_READ, which is a tuple in pynvml


@dataclass(frozen=True)
class Card:
    """What the driver tells of a GPU; None where it does not say. Clocks are in MHz.

    - `holders`: the processes that compute on it; `instances`: the number of its MIG instances.
    - `recovery`: what the driver asks for, "" for nothing.
    - `ecc_errors`: uncorrectable ones since the driver was loaded. `reset_pending`: some memory
      waits for a reset; `remap_failed`: a broken row of it could not be replaced.
    - `no_p2p`: why this card cannot read another's memory, by the index of the other.
    """

    gpu: DetectedGpu
    holders: tuple[NvmlProcess, ...] = ()
    instances: int | None = None
    recovery: str = ""
    ecc_errors: int = 0
    reset_pending: bool = False
    remap_failed: bool = False
    is_virtual: bool = False
    is_resting: bool = False
    reasons: tuple[str, ...] = ()
    sm_mhz: int | None = None
    max_sm_mhz: int | None = None
    watts: float | None = None
    default_watts: float | None = None
    generation: int | None = None
    max_generation: int | None = None
    lanes: int | None = None
    max_lanes: int | None = None
    nvlinks_up: int = 0
    nvlinks_down: int = 0
    no_p2p: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class MachineFacts:
    """All that is read of a machine. `driver_error` says why the driver or one of its cards does
    not answer; `kernel_module` is how NVIDIA's module in the kernel describes itself; `source` is
    where a recorded machine comes from, "" where it was read here."""

    host: Host
    torch: torch_build.TorchBuild
    cards: tuple[Card, ...] = ()
    driver: str = ""
    driver_error: str = ""
    kernel_module: str = ""
    has_amd_driver: bool = False
    system: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    format: int = FACTS_FORMAT

    @property
    def visible(self) -> list[Card]:
        """The cards that CUDA shows, `cuda:0` first."""
        cards = {card.gpu.index: card for card in self.cards}
        return [cards[g.index] for g in visible_gpus([c.gpu for c in self.cards], self.variables)]

    def title(self, card: Card) -> str:
        shown = self.visible
        at = f"cuda:{shown.index(card)}" if card in shown else f"GPU {card.gpu.index}"
        return f"{at} ({card.gpu.name})"

    @property
    def capability(self) -> tuple[int, int] | None:
        """Of the first card, for what to install: the driver's, else the catalogue's."""
        for card in self.visible:
            known = recognise_gpu(card.gpu.name, card.gpu.total_bytes)
            if found := card.gpu.capability or (known.capability if known else None):
                return found
        return None

    @property
    def container(self) -> str:
        """The kind of container, "" outside of one. Kubernetes and NVIDIA's images tell by a
        variable where no file does."""
        if self.variables.get("KUBERNETES_SERVICE_HOST"):
            return "kubepods"
        own_image = "docker" if self.variables.get("NVIDIA_PYTORCH_VERSION") else ""
        return self.host.container or own_image

    @property
    def is_windows(self) -> bool:
        return self.system.get("platform") == "win32"


def read_facts(environ: Mapping[str, str] = os.environ, root: Path = ROOT) -> MachineFacts:
    """Reads all facts. It takes as many seconds as another process takes to import torch."""
    torch = torch_build.ask_torch(environ)
    # A driver on which torch hangs would hang here as well, where nothing can end it.
    hangs = [why for why in (torch.error, *torch.failed.values()) if "took over" in why]
    return MachineFacts(
        host=read_host(root),
        torch=torch,
        cards=() if hangs else read_cards(),
        driver="" if hangs else nvml.driver_version() or "",
        driver_error="it was not asked, as torch hangs" if hangs else nvml.why_silent(),
        kernel_module=text_of(root / "proc/driver/nvidia/version").partition("\n")[0],
        has_amd_driver=(root / "dev/kfd").exists(),
        system={
            "platform": sys.platform, "description": platform.platform(),
            "python": platform.python_version(), "planner": __version__,
        },
        versions={name: found for name in PACKAGES if (found := installed_version(name))},
        variables={
            name: environ[name]
            for name in sorted(environ)
            if name in VARIABLES or name.startswith(_PREFIX)
        },
    )  # fmt: skip


def read_cards() -> tuple[Card, ...]:
    """All cards that answer."""
    devices = nvml.devices()
    cards = []
    for gpu in nvml.detected_gpus():
        if (device := devices[gpu.index]) is not None:
            others = {n: other for n, other in enumerate(devices) if other and n != gpu.index}
            cards.append(_read_card(gpu, device, others))
    return tuple(cards)


def _read_card(gpu: DetectedGpu, device: NvmlDevice, others: Mapping[int, NvmlDevice]) -> Card:
    ask = device.ask
    rows = ask(pynvml.nvmlDeviceGetRemappedRows) or (0, 0, 0, 0)
    links = [ask(pynvml.nvmlDeviceGetNvLinkState, n) for n in range(pynvml.NVML_NVLINK_MAX_LINKS)]
    peers = {n: ask(pynvml.nvmlDeviceGetP2PStatus, o.handle, _READ) for n, o in others.items()}
    fields = ask(pynvml.nvmlDeviceGetFieldValues, [_RECOVERY_FIELD])
    slots = ask(pynvml.nvmlDeviceGetMaxMigDeviceCount)
    handles = [ask(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, n) for n in range(slots or 0)]
    instances = len([handle for handle in handles if handle is not None])
    errors = ask(
        pynvml.nvmlDeviceGetTotalEccErrors,
        pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC,
    )  # fmt: skip
    return Card(
        gpu=gpu,
        holders=device.processes or (),
        instances=instances if gpu.is_split and slots else None,
        recovery=_RECOVERIES.get(fields[0].value.uiVal, "")
        if fields and fields[0].nvmlReturn == 0 else "",
        ecc_errors=errors or 0,
        reset_pending=bool(rows[2] or ask(pynvml.nvmlDeviceGetRetiredPagesPendingStatus)),
        remap_failed=bool(rows[3]),
        is_virtual=bool(ask(pynvml.nvmlDeviceGetVirtualizationMode)),
        is_resting=device.is_resting,
        reasons=device.throttle_reasons,
        sm_mhz=device.sm_mhz,
        max_sm_mhz=device.sm_max_mhz,
        watts=device.watts(pynvml.nvmlDeviceGetEnforcedPowerLimit),
        default_watts=device.watts(pynvml.nvmlDeviceGetPowerManagementDefaultLimit),
        generation=ask(pynvml.nvmlDeviceGetCurrPcieLinkGeneration),
        max_generation=ask(pynvml.nvmlDeviceGetMaxPcieLinkGeneration),
        lanes=ask(pynvml.nvmlDeviceGetCurrPcieLinkWidth),
        max_lanes=ask(pynvml.nvmlDeviceGetMaxPcieLinkWidth),
        nvlinks_up=links.count(1),
        nvlinks_down=links.count(0),
        no_p2p={n: _NO_P2P[why] for n, why in peers.items() if why in _NO_P2P},
    )  # fmt: skip


def load_facts(path: str | Path) -> MachineFacts:
    """The machine that `planner doctor --json` wrote to a file. Its `source` is that file where it
    names no other. Raises UsageError."""
    from pydantic import TypeAdapter, ValidationError

    from planner.core.schema.validation import MAX_FAULTS

    try:
        answer = parse_json(read_text(Path(path), MAX_RESULT_BYTES), str(path))
        raw = answer.get("machine", answer) if isinstance(answer, dict) else {}
        if not isinstance(raw, dict) or raw.get("format") != FACTS_FORMAT:
            law = f"{path} holds no machine of this planner's format, {FACTS_FORMAT}."
            raise UsageError(law, _WAY_OUT)
        facts: MachineFacts = TypeAdapter(MachineFacts).validate_python(raw)
    except ValidationError as error:
        faults = [
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg'].lower()}."
            for fault in error.errors()[:MAX_FAULTS]
        ]
        message = "\n  ".join((f"{path} holds no machine:", *faults))
        raise UsageError(message, _WAY_OUT) from None
    return facts if facts.source else replace(facts, source=str(path))


def install_line(facts: MachineFacts) -> str:
    """The line that installs a torch which can use this machine, where the installed one cannot; ""
    where none helps, as on AMD, whose builds are in no table."""
    torch = facts.torch
    is_of_amd = bool(torch.hip) or facts.has_amd_driver
    if is_of_amd or "took over" in torch.error or not _needs_another_torch(facts):
        return ""
    uninstall = "" if torch.is_missing else "pip uninstall --yes torch torchvision && "
    if not (facts.driver or facts.cards):
        return f"{uninstall}pip install torch torchvision --index-url {torch_build.INDEX}/cpu"
    build = torch_build.fitting_build(
        facts.driver, facts.capability, torch.version, facts.is_windows
    )
    if build is None:
        return ""
    packages = f'"torch=={torch_build.version_text(build.release)}.*" torchvision'
    return f"{uninstall}pip install {packages} --index-url {torch_build.INDEX}/{build.tag}"


def _needs_another_torch(facts: MachineFacts) -> bool:
    """Whether torch is missing, is a CPU build beside a GPU, is built for a CUDA that the driver
    does not run, or has no kernels for a card."""
    torch = facts.torch
    if torch.error:
        return True
    if torch.cuda is None:
        return bool(facts.visible)
    too_old = torch_build.driver_runs(facts.driver, torch.cuda, facts.is_windows) is False
    lacking = any(
        not torch_build.has_code_for(gpu.capability, torch.arch_list) for gpu in torch.gpus
    )
    return lacking or (too_old and not torch.available)
