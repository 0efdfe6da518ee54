"""What `nvidia-smi -q -x` says, as values; older drivers' words as well.

Element names are those of NVIDIA's nvsmi_device_v10.dtd to v13.dtd. A field that is missing, or
says "N/A", "Not Supported" or the like, is None. Since driver 550 throttle reasons are called
event reasons, and since 535 `power_readings` is `gpu_power_readings`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from planner.core.units import MIB
from planner.machine.hardware.detect import DetectedGpu
from planner.machine.machine import DriverFigures

_NOTHING = frozenset({
    "", "n/a", "not supported", "not available", "not found", "none", "unknown error",
    "insufficient permissions", "gpu requires reset", "gpu is lost", "error",
})  # fmt: skip
_LOST = frozenset({"gpu requires reset", "gpu is lost"})
# From P5 on, of P0 … P15 (nvml.h: 15 is the least performance), a card counts as at rest. A
# judgement: no source names the border.
_RESTING_STATE = 5


@dataclass(frozen=True)
class Process:
    """A process on a card: `kind` is C (computes), G (draws) or C+G."""

    pid: int
    kind: str
    name: str
    used_bytes: int | None


@dataclass(frozen=True)
class Link:
    """PCIe: generations and lanes, now and at most. `host_generation` is the slot's, and
    `card_generation` the card's, where the driver tells them apart."""

    generation: int | None = None
    max_generation: int | None = None
    card_generation: int | None = None
    host_generation: int | None = None
    width: int | None = None
    max_width: int | None = None


@dataclass(frozen=True)
class Ecc:
    """Error correction: counts since the driver was loaded, and what waits for a reset."""

    enabled: bool | None = None
    pending: bool | None = None
    uncorrectable: int = 0
    uncorrectable_ever: int = 0
    rows_remapped: int = 0
    rows_pending: bool = False
    rows_failed: bool = False
    pages_pending: bool = False


@dataclass(frozen=True)
class SmiCard:
    """One `<gpu>` of the log. Clocks in MHz, power in watts, temperature in °C, sizes in bytes;
    `is_virtual` where a virtual machine was handed the card; `unanswered` are fields for which the
    driver has only "Unknown Error"."""

    bus_id: str
    name: str
    uuid: str
    link: Link
    ecc: Ecc
    processes: tuple[Process, ...] = ()
    persistence: bool | None = None
    has_display: bool = False
    compute_mode: str = ""
    driver_model: str = ""
    mig: bool = False
    mig_pending: bool = False
    mig_instances: int | None = None
    reasons: tuple[str, ...] = ()
    performance_state: int | None = None
    idle: bool = False
    power_limit: float | None = None
    default_power_limit: float | None = None
    sm_mhz: int | None = None
    max_sm_mhz: int | None = None
    application_mhz: int | None = None
    default_application_mhz: int | None = None
    temperature: int | None = None
    recovery: str = ""
    is_virtual: bool = False
    is_lost: bool = False
    unanswered: tuple[str, ...] = ()

    @property
    def is_resting(self) -> bool:
        """Whether the card has nothing to do, and so may have lowered clocks and link."""
        state = self.performance_state
        return self.idle or (state is not None and state >= _RESTING_STATE)


@dataclass(frozen=True)
class SmiLog:
    """The whole log; `warnings` are lines that nvidia-smi printed around the XML."""

    driver: str = ""
    cuda: str = ""
    cards: tuple[SmiCard, ...] = ()
    warnings: tuple[str, ...] = ()


def parse_smi(text: str) -> SmiLog | None:
    """The log in what `nvidia-smi -q -x` printed; None where no whole log is in it."""
    start, end = text.find("<nvidia_smi_log>"), text.find("</nvidia_smi_log>")
    if start < 0 or end < 0:
        return None
    end += len("</nvidia_smi_log>")
    try:
        root = ElementTree.fromstring(text[start:end])
    except ElementTree.ParseError:
        return None
    around = (text[:start] + "\n" + text[end:]).splitlines()
    return SmiLog(
        driver=_text(root, "driver_version") or "",
        cuda=_text(root, "cuda_version") or "",
        cards=tuple(_card(gpu) for gpu in root.iter("gpu")),
        warnings=tuple(line.strip() for line in around if line.strip() and line.strip()[0] != "<"),
    )


def _card(gpu: Element) -> SmiCard:
    state = re.fullmatch(r"P(\d+)", _text(gpu, "performance_state") or "")
    reasons = frozenset(_reasons(gpu))
    power = gpu.find("gpu_power_readings")
    power = gpu.find("power_readings") if power is None else power
    return SmiCard(
        bus_id=_text(gpu, "pci/pci_bus_id") or gpu.get("id") or "",
        name=_text(gpu, "product_name") or "",
        uuid=_text(gpu, "uuid") or "",
        link=_link(gpu),
        ecc=_ecc(gpu),
        processes=tuple(_processes(gpu)),
        persistence=_flag(gpu, "persistence_mode"),
        has_display=bool(_flag(gpu, "display_active")),
        compute_mode=_text(gpu, "compute_mode") or "",
        driver_model=_text(gpu, "driver_model/current_dm") or "",
        mig=bool(_flag(gpu, "mig_mode/current_mig")),
        mig_pending=bool(_flag(gpu, "mig_mode/pending_mig")),
        mig_instances=len(gpu.findall("mig_devices/mig_device")),
        reasons=tuple(sorted(reasons - {"gpu_idle"})),
        performance_state=int(state.group(1)) if state else None,
        idle="gpu_idle" in reasons,
        power_limit=_first(power, "enforced_power_limit", "current_power_limit", "power_limit"),
        default_power_limit=_first(power, "default_power_limit"),
        sm_mhz=_integer(gpu, "clocks/sm_clock"),
        max_sm_mhz=_integer(gpu, "max_clocks/sm_clock"),
        application_mhz=_integer(gpu, "applications_clocks/graphics_clock"),
        default_application_mhz=_integer(gpu, "default_applications_clocks/graphics_clock"),
        temperature=_integer(gpu, "temperature/gpu_temp"),
        recovery=_recovery(gpu),
        is_virtual=_text(gpu, "gpu_virtualization_mode/virtualization_mode") is not None,
        is_lost=any(_said(field) in _LOST for field in gpu.iter()),
        unanswered=tuple(field.tag for field in gpu.iter() if _said(field) == "unknown error"),
    )


def _link(gpu: Element) -> Link:
    here = "pci/pci_gpu_link_info"
    return Link(
        generation=_integer(gpu, f"{here}/pcie_gen/current_link_gen"),
        max_generation=_integer(gpu, f"{here}/pcie_gen/max_link_gen"),
        card_generation=_integer(gpu, f"{here}/pcie_gen/max_device_link_gen"),
        host_generation=_integer(gpu, f"{here}/pcie_gen/max_host_link_gen"),
        width=_integer(gpu, f"{here}/link_widths/current_link_width"),
        max_width=_integer(gpu, f"{here}/link_widths/max_link_width"),
    )


def _ecc(gpu: Element) -> Ecc:
    pages = "retired_pages/pending_retirement", "retired_pages/pending_blacklist"
    return Ecc(
        enabled=_flag(gpu, "ecc_mode/current_ecc"),
        pending=_flag(gpu, "ecc_mode/pending_ecc"),
        uncorrectable=_uncorrectable(gpu.find("ecc_errors/volatile")),
        uncorrectable_ever=_uncorrectable(gpu.find("ecc_errors/aggregate")),
        rows_remapped=_integer(gpu, "remapped_rows/remapped_row_unc") or 0,
        rows_pending=bool(_flag(gpu, "remapped_rows/remapped_row_pending")),
        rows_failed=bool(_flag(gpu, "remapped_rows/remapped_row_failure")),
        pages_pending=any(_flag(gpu, page) for page in pages),
    )


def _uncorrectable(counts: Element | None) -> int:
    """Since Turing `dram_uncorrectable` and `sram_uncorrectable…`; before, `double_bit/total`."""
    if counts is None:
        return 0
    total = _integer(counts, "double_bit/total") or 0
    return total + sum(
        _integer(counts, child.tag) or 0
        for child in counts
        if re.match(r"[ds]ram_uncorrectable", child.tag)
    )


def _reasons(gpu: Element) -> Iterator[str]:
    """The reasons in force, without the prefix that has changed: `sw_power_cap`."""
    for name in ("clocks_event_reasons", "clocks_throttle_reasons"):
        for child in gpu.iterfind(f"{name}/*"):
            if (child.text or "").strip() == "Active":
                yield re.sub(r"^clocks_(event|throttle)_reason_", "", child.tag)


def _processes(gpu: Element) -> Iterator[Process]:
    for found in gpu.iterfind("processes/process_info"):
        used = _integer(found, "used_memory")
        yield Process(
            pid=_integer(found, "pid") or 0,
            kind=_text(found, "type") or "",
            name=_text(found, "process_name") or "",
            used_bytes=None if used is None else used * MIB,
        )


def _recovery(gpu: Element) -> str:
    """What the driver says must be done with the card, "" where nothing."""
    if _flag(gpu, "gpu_reset_status/reset_required"):
        return "reset required"
    return _text(gpu, "gpu_recovery_action") or ""


def _first(parent: Element | None, *names: str) -> float | None:
    if parent is None:
        return None
    found = (_number(parent, name) for name in names)
    return next((value for value in found if value is not None), None)


def _said(field: Element) -> str:
    """A field's text as it is compared: "[N/A]" is "n/a"."""
    return (field.text or "").strip().strip("[]").lower()


def _text(parent: Element, path: str) -> str | None:
    field = parent.find(path)
    return None if field is None or _said(field) in _NOTHING else (field.text or "").strip()


def _flag(parent: Element, path: str) -> bool | None:
    found = (_text(parent, path) or "").lower()
    return {"enabled": True, "yes": True, "disabled": False, "no": False}.get(found)


def _number(parent: Element, path: str) -> float | None:
    """The number at the head of "16x", "250.00 W", "1410 MHz"."""
    match = re.match(r"-?\d+(\.\d+)?", _text(parent, path) or "")
    return float(match.group()) if match else None


def _integer(parent: Element, path: str) -> int | None:
    found = _number(parent, path)
    return None if found is None else int(found)


_COMPUTE_MODES = ("Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process")  # nvml.h
_UNKNOWN_STATE = 32


def card_from_figures(gpu: DetectedGpu, figures: DriverFigures) -> SmiCard:
    """What the driver's library told of a card, as nvidia-smi would have told it."""
    state, mode = figures.performance_state, figures.compute_mode
    modes = dict(enumerate(_COMPUTE_MODES))
    return SmiCard(
        bus_id=gpu.pci_bus_id,
        name=gpu.name,
        uuid=gpu.uuid,
        link=Link(
            generation=figures.generation,
            max_generation=figures.max_generation,
            width=figures.width,
            max_width=figures.max_width,
        ),
        ecc=Ecc(),
        persistence=None if figures.persistence is None else bool(figures.persistence),
        has_display=bool(figures.display),
        compute_mode="" if mode is None else modes.get(mode, ""),
        mig=gpu.is_split,
        mig_pending=gpu.is_split,
        reasons=figures.reasons,
        idle=figures.idle,
        performance_state=None if state == _UNKNOWN_STATE else state,
        power_limit=_from_milliwatts(figures.power_limit),
        default_power_limit=_from_milliwatts(figures.default_power_limit),
        sm_mhz=figures.sm_mhz,
        max_sm_mhz=figures.max_sm_mhz,
        temperature=figures.temperature,
    )


def _from_milliwatts(power: int | None) -> float | None:
    return None if power is None else power / 1000
