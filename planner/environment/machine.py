"""A machine as its tools and files answered: raw, frozen, and kept as JSON.

Reading is one thing and judging another. What is here was only read; `facts` says what it means,
`findings` what follows. So a machine that somebody recorded is judged as this one is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from planner.environment.host import Host
from planner.environment.torch_build import TorchBuild
from planner.errors import PlannerError
from planner.hardware.detect import DetectedGpu

MACHINE_FORMAT = 1


@dataclass(frozen=True)
class Answer:
    """What a tool printed (both streams) and its exit status; `error` says why there is none:
    "missing", or that it was late."""

    command: str = ""
    text: str = ""
    status: int | None = None
    error: str = ""

    @property
    def is_missing(self) -> bool:
        """Whether the tool is not installed, or was never asked."""
        return self.error == "missing" or not self.command


@dataclass(frozen=True)
class DriverFigures:
    """What the driver's library (NVML) tells of a card, in its own numbers: flags 0 and 1, compute
    modes 0 to 3, clocks in MHz, power in milliwatts, temperature in °C. None where it does not
    answer."""

    persistence: int | None = None
    display: int | None = None
    compute_mode: int | None = None
    performance_state: int | None = None
    generation: int | None = None
    max_generation: int | None = None
    width: int | None = None
    max_width: int | None = None
    power_limit: int | None = None
    default_power_limit: int | None = None
    sm_mhz: int | None = None
    max_sm_mhz: int | None = None
    temperature: int | None = None
    reasons: tuple[str, ...] = ()
    idle: bool = False


@dataclass(frozen=True)
class DriverAnswer:
    """The cards as the driver's library lists them, and its figures by the card's UUID."""

    gpus: tuple[DetectedGpu, ...] = ()
    figures: Mapping[str, DriverFigures] = field(default_factory=dict)


@dataclass(frozen=True)
class PciDevice:
    """A graphics device as the kernel lists it in /sys/bus/pci/devices. Widths are lanes, speeds
    the kernel's text ("16.0 GT/s PCIe"); `port_` is the slot or bridge above it."""

    vendor: str = ""
    numa_node: int | None = None
    width: int | None = None
    max_width: int | None = None
    max_speed: str = ""
    port_max_width: int | None = None
    port_max_speed: str = ""


@dataclass(frozen=True)
class Machine:
    """All raw answers. `source` is where a recorded machine comes from, "" where it was read here.

    `smi` and `topology` are nvidia-smi's; `gpus` are those of `planner.hardware.detect`, or of the
    driver's library where nvidia-smi is missing (`gpus_from` says which, `figures` are what else it
    told). `numa_nodes` maps a node to the CPUs of it, `pci` a bus address to the device there,
    `import_errors` a package to why it cannot be imported.
    """

    host: Host
    torch: TorchBuild
    system: Mapping[str, str] = field(default_factory=dict)
    smi: Answer = field(default_factory=Answer)
    topology: Answer = field(default_factory=Answer)
    gpus: tuple[DetectedGpu, ...] = ()
    gpus_from: str = ""
    figures: Mapping[str, DriverFigures] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    requirements: Mapping[str, str] = field(default_factory=dict)
    import_errors: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    affinity: str = ""
    numa_nodes: Mapping[str, str] = field(default_factory=dict)
    pci: Mapping[str, PciDevice] = field(default_factory=dict)
    device_files: tuple[str, ...] = ()
    kernel_module: str = ""
    scaling_driver: str = ""
    source: str = ""
    format: int = MACHINE_FORMAT

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def machine_from_json(found: object, where: str = "it") -> Machine:
    """The machine in what `planner doctor --json` wrote, or in a `to_json`. Raises PlannerError."""
    from pydantic import TypeAdapter, ValidationError

    raw = found.get("machine", found) if isinstance(found, dict) else found
    way_out = "Write it with 'planner doctor --json'."
    if isinstance(raw, dict) and raw.get("format", MACHINE_FORMAT) != MACHINE_FORMAT:
        raise PlannerError(f"{where} holds a machine in another format than this planner's.",
                           "Write it again with this version of planner.")  # fmt: skip
    try:
        return TypeAdapter(Machine).validate_python(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "it"
        raise PlannerError(
            f"{where} holds no machine: {place}: {first['msg'].lower()}.", way_out
        ) from None


def load_machine(path: str | Path) -> Machine:
    """The machine that a file holds. Raises PlannerError where it cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise PlannerError(f"{path} cannot be read: {why}.") from None
    try:
        return machine_from_json(json.loads(text), str(path))
    except (json.JSONDecodeError, RecursionError):
        raise PlannerError(
            f"{path} is not JSON.", "Write it with 'planner doctor --json'."
        ) from None
