"""A machine as its tools and files answered: raw, frozen, and kept as JSON.

Reading is one thing and judging another. What is here was only read; `facts` says what it means,
`findings` what follows. So a machine that somebody recorded is judged as this one is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from planner.core.errors import UsageError, shorten
from planner.core.files import MAX_RESULT_BYTES, parse_json, read_text
from planner.machine.hardware.detect import DetectedGpu
from planner.machine.host import Host
from planner.machine.torch_build import TorchBuild

MACHINE_FORMAT = 1
_WAY_OUT = "Write it with 'planner doctor --json'."


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
    """A graphics device as the kernel lists it in /sys/bus/pci/devices. Widths are lanes;
    `port_` is the slot or bridge above it."""

    vendor: str = ""
    numa_node: int | None = None
    width: int | None = None
    max_width: int | None = None
    port_max_width: int | None = None


@dataclass(frozen=True)
class Nic:
    """A network card as the kernel lists it: "ethernet" in /sys/class/net, "infiniband" or "roce"
    in /sys/class/infiniband. `gbits` is its rate now, None where it does not say."""

    kind: str
    gbits: float | None = None
    is_up: bool = False
    numa_node: int | None = None


@dataclass(frozen=True)
class Machine:
    """All raw answers. `source` is where a recorded machine comes from, "" where it was read here.

    `smi`, `topology`, `peers` (topo -p2p r) and `nvlink` (nvlink --status) are nvidia-smi's; `gpus`
    are those of the driver's library (of older records also nvidia-smi's: `gpus_from` says which),
    and `figures` what it told of them where nvidia-smi is missing. `numa_nodes` maps a node to
    the CPUs of it, `pci` a bus address to the device there, `nics` the kernel's name of a network
    card to it, `import_errors` a package to why it cannot be imported. `peermem` is whether
    nvidia_peermem, or its forerunner, is loaded, None in older records.
    """

    host: Host
    torch: TorchBuild
    system: Mapping[str, str] = field(default_factory=dict)
    smi: Answer = field(default_factory=Answer)
    topology: Answer = field(default_factory=Answer)
    peers: Answer = field(default_factory=Answer)
    nvlink: Answer = field(default_factory=Answer)
    nics: Mapping[str, Nic] = field(default_factory=dict)
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
    peermem: bool | None = None
    scaling_driver: str = ""
    source: str = ""
    format: int = MACHINE_FORMAT

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def machine_from_json(found: object, where: str = "it") -> Machine:
    """The machine in what `planner doctor --json` wrote, or in a `to_json`. Raises UsageError."""
    from pydantic import TypeAdapter, ValidationError

    raw = found.get("machine", found) if isinstance(found, dict) else found
    if not isinstance(raw, dict):
        raise UsageError(f"{where} holds no machine: it is no JSON object.", _WAY_OUT)
    if raw.get("format", MACHINE_FORMAT) != MACHINE_FORMAT:
        raise UsageError(
            f"{where} holds a machine in format {shorten(raw['format'])}, and this planner reads "
            f"format {MACHINE_FORMAT}.",
            "Write it again with this version of planner.",
        )
    try:
        return TypeAdapter(Machine).validate_python(raw)
    except ValidationError as error:
        first = error.errors()[0]
        is_object = first["type"] == "dataclass_type"
        fault = "it should be an object" if is_object else first["msg"].lower()
        place = ".".join(map(str, first["loc"]))
        raise UsageError(f"{where} holds no machine: {place}: {fault}.", _WAY_OUT) from None


def load_machine(path: str | Path) -> Machine:
    """The machine that a file holds, with the file as its `source` where it tells no other. Raises
    UsageError where it cannot be read."""
    text = read_text(Path(path), MAX_RESULT_BYTES)
    try:
        machine = machine_from_json(parse_json(text, str(path)), str(path))
    except UsageError as error:
        raise UsageError(error.message, error.way_out or _WAY_OUT) from None
    return machine if machine.source else replace(machine, source=str(path))
