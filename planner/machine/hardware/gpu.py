"""GPUs: the memory and the rates of those that people train on, how to find one by the name that a
person or a driver gives it, and the precisions that a device computes in at speed.

The figures are in `gpus.json`, each with where it comes from. Rates are dense: the sparse figures
of datasheets are halved, and GeForce cards count with fp32 accumulation, as training uses it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter

from planner.core.errors import UnsupportedError, UsageError, alternatives, shorten
from planner.core.units import GIB

if TYPE_CHECKING:
    from planner.core.schema import DeviceInfo

# PCIe 4.0 x16, bytes/s one way (16 GT/s, 128 bits of 130 are data): taken of a device that is not
# in the catalogue.
ASSUMED_LINK = 31.5e9


@dataclass(frozen=True)
class Gpu:
    """One device. Memory in bytes, rates in FLOP/s (dense, a multiply-add is two) and bytes/s.

    `memory_bytes` is what the driver reports as total, or the marketed size read as GiB where no
    report was found (`sources["memory_bytes"]` says which). A rate is None where the device has no
    such unit. `sources` maps a field to where its figure comes from. `capability` is CUDA's, None
    where the device is not NVIDIA's. `device_names` are what its driver calls it. `fp32_flops` is
    that of a matmul at full precision (on AMD the matrix units'). `memory_type` is "HBM2e",
    "GDDR6X" and the like. `link_bandwidth` is that to the host, one way. `joined_by` names the link
    of `links.json` between several of them in a machine, as most are sold; None where no figures
    were found of it. `boost_mhz` is None where no clock is published.
    """

    name: str
    title: str
    vendor: Literal["NVIDIA", "AMD"]
    architecture: str
    capability: tuple[int, int] | None
    memory_bytes: int
    bandwidth: float
    fp32_flops: float
    tf32_flops: float | None
    bf16_flops: float | None
    fp16_flops: float | None
    sources: Mapping[str, str] = field(hash=False)
    device_names: tuple[str, ...]
    num_sms: int
    boost_mhz: int | None
    memory_type: str
    link_bandwidth: float
    joined_by: str | None

    @property
    def threads_per_sm(self) -> int:
        """The most that reside on one multiprocessor (CUDA C++ Programming Guide, technical
        specifications per compute capability); 2,048 where it is not NVIDIA's."""
        if self.capability is None:
            return 2048
        if self.capability == (7, 5):
            return 1024
        return 1536 if self.capability in ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1)) else 2048

    @property
    def fp8_flops(self) -> float | None:
        """Twice bf16's from capability 8.9 on, dense and with FP32 accumulation: H100 2,000 TFLOP/s
        against 1,000 (NVIDIA Hopper Architecture In-Depth, table 3), L40S 733 against 362 (its
        datasheet), RTX 4090 330 against 165 (Ada GPU Architecture whitepaper v2.02, appendix A),
        RTX 5090 419 against 209.5 (RTX Blackwell whitepaper, table 3), B200 4,500 against 2,250
        (glennklockwood.com, B200). Of others it is assumed."""
        if self.bf16_flops is None or (self.capability or (0, 0)) < (8, 9):
            return None
        return 2 * self.bf16_flops

    @property
    def has_bf16(self) -> bool:
        """Whether autocast to bf16 is worth having: the device has bf16 matrix units."""
        return self.bf16_flops is not None


# A GPU as the driver lists it, which of them CUDA sees, and how people name a device.


@dataclass(frozen=True)
class DetectedGpu:
    """One device as the driver lists it. `used_bytes` is what all processes hold on it now;
    sizes are None where the driver does not say (devices that share the host's memory)."""

    index: int
    name: str
    uuid: str
    total_bytes: int | None
    used_bytes: int | None
    driver: str
    capability: tuple[int, int] | None
    is_split: bool = False  # into MIG instances
    pci_bus_id: str = ""


def read_device(text: str) -> str:
    """A device as people write it (`CUDA`, `cpu:0`) as "auto", "cpu" or "cuda:N". Raises
    UsageError."""
    match = re.fullmatch(r"(auto)|(cpu)(?::0)?|cuda(?::([0-9]{1,3}))?", text.strip().lower())
    if match is None:
        raise UsageError(
            f"unknown device {shorten(text)}.", "Devices are auto, cpu, cuda:0, cuda:1 …"
        )
    return match.group(1) or match.group(2) or f"cuda:{int(match.group(3) or 0)}"


def visible_gpus(
    gpus: Sequence[DetectedGpu], environ: Mapping[str, str] = os.environ
) -> list[DetectedGpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves visible, in its order: `cuda:0` first.

    Indices are read in the driver's order, which is CUDA's own with CUDA_DEVICE_ORDER=PCI_BUS_ID
    and on machines whose GPUs are all of one kind. As in CUDA, the first unknown entry ends the
    list.
    """
    entries = environ.get("CUDA_VISIBLE_DEVICES")
    if entries is None:
        return list(gpus)
    visible: list[DetectedGpu] = []
    for entry in (part.strip() for part in entries.split(",")):
        named = [g for g in gpus if entry == str(g.index) or (entry and g.uuid.startswith(entry))]
        if len(named) != 1 or named[0] in visible:
            break
        visible.append(named[0])
    return visible


# Reasons for low clocks that make a measurement untrustworthy: those of heat and power supply among
# nvmlClocksEventReasons (nvml.h), without its prefix, the gravest first. A power cap is none of
# them: large matrix products meet it on every card, and so will the training itself.
DISTURBING_REASONS = {
    "hw_thermal_slowdown": "the hardware has at least halved the clocks because of heat",
    "hw_power_brake_slowdown": "the power supply asked the hardware to at least halve the clocks",
    "hw_slowdown": "the hardware has at least halved the clocks",
    "sw_thermal_slowdown": "the driver has lowered the clocks because of heat",
}

# The catalogue, and how to find one in it.

WAY_OUT = "List GPUs with 'planner gpus'."

_FIGURES = (
    "memory_bytes", "bandwidth", "fp32_flops", "tf32_flops", "bf16_flops", "fp16_flops",
    "memory_type",
)  # fmt: skip
# Brands and form factors are words of their own, even where they are written together ("rtxa6000").
_SILENT = r"nvidia|geforce|tesla|amd|instinct|generation|graphics|edition|oam|hbm\d?e?"
_WORD = rf"(?:{_SILENT}|[^a-z0-9])*(titan|quadro|rtx|pro|sxm\d?|pcie|ti|[a-z]+|\d+)"
# A card of the same name with another amount of memory differs by far more than this; what a
# driver keeps for itself, with ECC or without, differs by less.
_MEMORY_TOLERANCE = 0.12


@cache
def all_gpus() -> tuple[Gpu, ...]:
    """Every GPU of the catalogue, oldest architecture first."""
    data = json.loads(Path(__file__).with_name("gpus.json").read_text(encoding="utf-8"))
    entries = [_in_our_units(entry, data) for entry in data["gpus"]]
    return TypeAdapter(tuple[Gpu, ...]).validate_python(entries)


def find_gpu(text: str) -> Gpu:
    """The GPU that `text` names, forgiving case, separators and brands: `RTX 3090`, `rtx3090`,
    `rtx-3090`, or a driver's own "NVIDIA GeForce RTX 3090".

    A bare number is the card of that number: `3090` is no 3090 Ti. Raises UsageError, with a list
    of the choices, where the text means no GPU or several ("a100").
    """
    matches, words = matching_gpus(text), _split_name(text)
    # "4070 super" is not the Ti: a bare number means the card whose name it is after the brand.
    exact = [g for g in matches if words[0].isdigit() and _split_name(g.name)[1:] == words]
    if len(exact or matches) == 1:
        return (exact or matches)[0]
    if matches:
        names = ", ".join(repr(gpu.name) for gpu in matches)
        raise UsageError(f"{text!r} names {len(matches)} GPUs: {names}.", "Name one of them.")
    near = [repr(name) for name in _nearest_names(text)]
    hint = f" Did you mean {alternatives(near)}?" if near else ""
    raise UsageError(f"unknown GPU {text!r}.{hint}", WAY_OUT)


def matching_gpus(text: str) -> tuple[Gpu, ...]:
    """The GPUs that `text` names as a whole, or else those whose names contain its words."""
    words = _split_name(text)
    if not words:
        return ()
    exact = [gpu for gpu in all_gpus() if words in _names(gpu)]
    return tuple(
        exact or [g for g in all_gpus() if any(_is_within(words, name) for name in _names(g))]
    )


@cache
def recognise_gpu(device_name: str, total_bytes: int | None = None) -> Gpu | None:
    """The catalogue's entry for a device as its driver names it, or None where it has none.

    `total_bytes`, the driver's own total, tells apart the cards that share a name.
    """
    words = _split_name(device_name)
    matches = [gpu for gpu in all_gpus() if words in [_split_name(n) for n in gpu.device_names]]
    if total_bytes is not None:
        matches = [g for g in matches if abs(total_bytes / g.memory_bytes - 1) <= _MEMORY_TOLERANCE]
    return matches[0] if len(matches) == 1 else None


def _in_our_units(
    entry: Mapping[str, Any], data: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The fields of a `Gpu`, of its line in `gpus.json` and what that names there."""
    document = entry["document"]
    if (name := entry.get("host_link", document)) not in data["host_links"]:
        raise ValueError(f"'host_links' of gpus.json lacks {name!r}: add it, or name a 'host_link'")
    link = data["host_links"][name]
    sources = dict.fromkeys(_FIGURES, data["documents"][document])
    rates = {}
    for name in ("fp32", "tf32", "bf16", "fp16"):
        tflops = entry[f"{name}_tflops"]
        rates[f"{name}_flops"] = None if tflops is None else tflops * 1e12
        if name != "fp32":
            sources[f"{name}_flops"] += data["tensor_notes"].get(document, "")
    sources["link_bandwidth"] = link["source"]
    sources["memory_bytes"] = _memory_source(entry["memory_gib"], entry["memory_from"])
    return {
        **entry,
        **rates,
        "memory_bytes": int(entry["memory_gib"] * GIB),
        "bandwidth": entry["bandwidth_gb_s"] * 1e9,
        "link_bandwidth": link["gb_s"] * 1e9,
        "sources": {**sources, **entry.get("sources", {})},
    }


def _memory_source(gib: float, origin: str) -> str:
    if origin == "cuda":
        return f"total capacity in PyTorch's out-of-memory messages, public reports: {gib} GiB"
    if origin == "marketed":
        return f"marketed size read as {gib} GiB: what the driver reports is a few percent less"
    other = origin.removeprefix("like ")
    return f"no report found: taken to be that of {other}"


def _split_name(text: str) -> tuple[str, ...]:
    """`NVIDIA A100-SXM4-80GB` -> ("a", "100", "sxm", "80", "gb"): the parts of a name, however they
    are joined, without the brands that people may leave out."""
    words = re.findall(_WORD, text.casefold())
    return tuple(word[:3] if word.startswith("sxm") else word for word in words)


@cache
def _names(gpu: Gpu) -> tuple[tuple[str, ...], ...]:
    return tuple(_split_name(name) for name in (gpu.name, *gpu.device_names))


def _is_within(words: Iterable[str], name: tuple[str, ...]) -> bool:
    """Whether `words` are a subsequence of `name`."""
    rest = iter(name)
    return all(word in rest for word in words)


def _nearest_names(text: str) -> list[str]:
    """The three names with the number of `text`, or else those whose beginning (`h100` of
    `h100-sxm-80gb`) resembles it; the most similar first."""
    import difflib  # only a mistyped name pays for it

    words = _split_name(text)
    joined, number = "".join(words), next((word for word in words if word.isdigit()), "")
    scored = []
    for gpu in all_gpus():
        parts = gpu.name.split("-")
        heads = ["".join(parts[:end]) for end in range(1, len(parts) + 1)]
        score = max(difflib.SequenceMatcher(None, joined, head).ratio() for head in heads)
        numbers = [sorted(word) for word in _split_name(gpu.name) if len(word) > 2]
        has_number = sorted(number) in numbers  # 3900 is a 3090
        scored.append((has_number, score, gpu.name))
    near = [row for row in scored if row[0]] or [row for row in scored if row[1] >= 0.6]
    return [name for *_, name in sorted(near, key=lambda row: -row[1])[:3]]


# The precisions of a device.

# Matrix units for fp16 came with capability 7.0, for tf32 and bf16 with 8.0 (NVIDIA, CUDA C++
# Programming Guide, table of tensor core types), for fp8 with 8.9 (torch/testing/_internal/
# common_cuda.py, PLATFORM_SUPPORTS_FP8). Pascal (6.x) has none: fp16 moves half the bytes there. On
# AMD torch multiplies no tf32 by itself.
_NEEDS = {
    "fp8": "an NVIDIA GPU of compute capability 8.9 or more",
    "fp16": "compute capability 6.0 or more",
    "bf16": "compute capability 8.0 or more",
    "pure-bf16": "compute capability 8.0 or more",
    "tf32": "an NVIDIA GPU of compute capability 8.0 or more",
}
CPU_PRECISIONS = ("fp32", "bf16")


def precisions_of(vendor: str, capability: tuple[int, int] | None) -> tuple[str, ...]:
    """fp32, and the precisions in which a GPU is faster."""
    if vendor == "AMD":
        return ("fp32", "bf16", "fp16")
    capability = capability or (0, 0)
    if capability >= (8, 9):
        return ("fp32", "tf32", "bf16", "fp16", "fp8")
    if capability >= (8, 0):
        return ("fp32", "tf32", "bf16", "fp16")
    return ("fp32", "fp16") if capability >= (6, 0) else ("fp32",)


def device_precisions(device: DeviceInfo) -> tuple[str, ...]:
    """The precisions in which a device computes at speed."""
    if device.kind == "cpu":
        return CPU_PRECISIONS
    vendor = "AMD" if "amd" in device.name.casefold().split() else "NVIDIA"
    return precisions_of(vendor, device.capability)


def lacks(gpu: Gpu, precision: str) -> bool:
    """Whether `gpu` gains nothing by `precision` (as a setting names it)."""
    offered = precisions_of(gpu.vendor, gpu.capability)
    return precision.removeprefix("pure-") not in offered


def peak_flops(gpu: Gpu, precision: str) -> float | None:
    """The datasheet's dense FLOP/s of matrix products in `precision`; None where there is none, and
    for fp8, of which attention and small layers stay in bf16."""
    peaks = {
        "fp32": gpu.fp32_flops, "tf32": gpu.tf32_flops, "bf16": gpu.bf16_flops,
        "fp16": gpu.fp16_flops,
    }  # fmt: skip
    return peaks.get(precision.removeprefix("pure-"))


def check_precision(gpu: Gpu | None, precision: str) -> None:
    """Raises UnsupportedError where `gpu` lacks `precision`."""
    if gpu is not None and lacks(gpu, precision):
        raise lacking_error(gpu.title, precision, precisions_of(gpu.vendor, gpu.capability))


def check_device_precision(device: DeviceInfo, precision: str) -> None:
    """Raises UnsupportedError where a probed GPU, for which `emit` writes, lacks `precision`. A
    CPU's result may be meant for any GPU, and one of which nothing is known may have every
    precision."""
    if device.kind == "cpu":
        return
    name, offered = device.name, device_precisions(device)
    if device.capability is None:
        gpu = recognise_gpu(device.name, device.total_bytes)
        if gpu is None:
            return
        name, offered = gpu.title, precisions_of(gpu.vendor, gpu.capability)
    if precision.removeprefix("pure-") not in offered:
        others = ", or ".join(f"--set precision={other}" for other in reversed(offered))
        raise lacking_error(name, precision, offered, f"Emit with {others} (not measured).")


def lacking_error(
    name: str, precision: str, offered: tuple[str, ...], way_out: str = ""
) -> UnsupportedError:
    return UnsupportedError(
        f"{precision} needs {_NEEDS[precision]}, and {name} supports only "
        f"{alternatives(offered, 'and')}.",
        way_out or f"Choose --precision {alternatives(reversed(offered))}.",
    )
