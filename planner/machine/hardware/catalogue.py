"""The GPUs people train on, and how to find one by the name a person or a driver gives it.

The figures are in `gpus.json`, each with where it comes from. Rates are dense: the sparse figures
of datasheets are halved, and GeForce cards count with fp32 accumulation, as training uses it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from planner.core.errors import UsageError, alternatives
from planner.core.units import GIB
from planner.machine.hardware.gpu import Gpu

WAY_OUT = "List GPUs with 'planner gpus'."

_FIGURES = (
    "memory_bytes", "bandwidth", "fp32_flops", "tf32_flops", "bf16_flops", "fp16_flops",
    "memory_type",
)  # fmt: skip
# Brands and form factors are words of their own even where they are run together ("rtxa6000").
_SILENT = r"nvidia|geforce|tesla|amd|instinct|generation|graphics|edition|oam|hbm\d?e?"
_WORD = rf"(?:{_SILENT}|[^a-z0-9])*(titan|quadro|rtx|pro|sxm\d?|pcie|ti|[a-z]+|\d+)"
# A card of the same name with another amount of memory differs by far more than this; what a
# driver keeps for itself, with ECC or without, differs by less.
_MEMORY_TOLERANCE = 0.12


@cache
def all_gpus() -> tuple[Gpu, ...]:
    """Every GPU of the catalogue, oldest architecture first."""
    data = json.loads(Path(__file__).with_name("gpus.json").read_text(encoding="utf-8"))
    return tuple(_gpu(entry, data) for entry in data["gpus"])


def find_gpu(text: str) -> Gpu:
    """The GPU that `text` names, forgiving case, separators and brands: `RTX 3090`, `rtx3090`,
    `rtx-3090`, or a driver's own "NVIDIA GeForce RTX 3090".

    A bare number is the card of that number: `3090` is no 3090 Ti. Raises UsageError where no GPU
    is meant, or several are ("a100"): then it lists the choices.
    """
    found, words = matching_gpus(text), _words(text)
    # Of "4070 super" not the Ti: a number is that of a card whose name it begins after the brand.
    meant = [gpu for gpu in found if words[0].isdigit() and _words(gpu.name)[1:] == words] or found
    if len(meant) == 1:
        return meant[0]
    if found:
        names = ", ".join(repr(gpu.name) for gpu in found)
        raise UsageError(f"{text!r} names {len(found)} GPUs: {names}.", "Name one of them.")
    near = [repr(name) for name in _nearest_names(text)]
    hint = f" Did you mean {alternatives(near)}?" if near else ""
    raise UsageError(f"unknown GPU {text!r}.{hint}", WAY_OUT)


def matching_gpus(text: str) -> tuple[Gpu, ...]:
    """Those the whole of `text` names, or else those whose name contains its words in order."""
    words = _words(text)
    if not words:
        return ()
    exact = [gpu for gpu in all_gpus() if any(words == known for known in _names(gpu))]
    return tuple(
        exact or [g for g in all_gpus() if any(_is_within(words, known) for known in _names(g))]
    )


@cache
def recognise_gpu(device_name: str, total_bytes: int | None = None) -> Gpu | None:
    """The catalogue's entry for a device as its driver names it, or None where it has none.

    `total_bytes`, the driver's own total, tells apart the cards that share a name.
    """
    words = _words(device_name)
    found = [gpu for gpu in all_gpus() if words in [_words(n) for n in gpu.device_names]]
    if total_bytes is not None:
        found = [g for g in found if _is_near(g.memory_bytes, total_bytes)]
    return found[0] if len(found) == 1 else None


def _gpu(entry: Mapping[str, Any], data: Mapping[str, Mapping[str, Any]]) -> Gpu:
    document = entry["document"]
    sources = dict.fromkeys(_FIGURES, data["documents"][document])
    for name in ("tf32_flops", "bf16_flops", "fp16_flops"):
        sources[name] += data["tensor_notes"].get(document, "")
    link = data["links"][entry.get("link", document)]
    sources["link_bandwidth"] = link["source"]
    sources["memory_bytes"] = _memory_source(entry["memory_gib"], entry["memory_from"])
    capability = entry["capability"]
    return Gpu(
        name=entry["name"],
        title=entry["title"],
        vendor=entry["vendor"],
        architecture=entry["architecture"],
        capability=(capability[0], capability[1]) if capability else None,
        memory_bytes=int(entry["memory_gib"] * GIB),
        bandwidth=entry["bandwidth_gb_s"] * 1e9,
        fp32_flops=entry["fp32_tflops"] * 1e12,
        tf32_flops=_rate(entry["tf32_tflops"]),
        bf16_flops=_rate(entry["bf16_tflops"]),
        fp16_flops=_rate(entry["fp16_tflops"]),
        sources={**sources, **entry.get("sources", {})},
        device_names=tuple(entry["device_names"]),
        num_sms=entry["num_sms"],
        boost_mhz=entry["boost_mhz"],
        memory_type=entry["memory_type"],
        link_bandwidth=link["gb_s"] * 1e9,
    )


def _rate(tflops: float | None) -> float | None:
    return None if tflops is None else tflops * 1e12


def _memory_source(gib: float, origin: str) -> str:
    if origin == "cuda":
        return f"total capacity in PyTorch's out-of-memory messages, public reports: {gib} GiB"
    if origin == "marketed":
        return f"marketed size read as {gib} GiB: what the driver reports is a few percent less"
    other = origin.removeprefix("like ")
    return f"no report found: taken to be that of {other}"


def _words(text: str) -> tuple[str, ...]:
    """`NVIDIA A100-SXM4-80GB` -> ("a", "100", "sxm", "80", "gb"): what a person may run together
    is taken apart, and brands that some say and others do not are left out."""
    words = re.findall(_WORD, text.casefold())
    return tuple(word[:3] if word.startswith("sxm") else word for word in words)


@cache
def _names(gpu: Gpu) -> tuple[tuple[str, ...], ...]:
    return tuple(_words(name) for name in (gpu.name, *gpu.device_names))


def _is_within(words: Iterable[str], known: tuple[str, ...]) -> bool:
    """Whether `words` are a subsequence of `known`."""
    rest = iter(known)
    return all(word in rest for word in words)


def _is_near(memory_bytes: int, total_bytes: int) -> bool:
    return abs(total_bytes / memory_bytes - 1) <= _MEMORY_TOLERANCE


def _nearest_names(text: str, count: int = 3) -> list[str]:
    """Names with the number of `text`, or else whose beginning (`h100` of `h100-sxm-80gb`) looks
    like it; those that look most like it first."""
    import difflib  # only a mistyped name pays for it

    words = _words(text)
    wanted, number = "".join(words), next((word for word in words if word.isdigit()), "")
    scored = []
    for gpu in all_gpus():
        parts = gpu.name.split("-")
        heads = ["".join(parts[:end]) for end in range(1, len(parts) + 1)]
        score = max(difflib.SequenceMatcher(None, wanted, head).ratio() for head in heads)
        numbers = [sorted(word) for word in _words(gpu.name) if len(word) > 2]  # 3900 is a 3090
        has_number = sorted(number) in numbers
        scored.append((has_number, score, gpu.name))
    near = [found for found in scored if found[0]] or [found for found in scored if found[1] >= 0.6]
    return [name for *_, name in sorted(near, key=lambda found: -found[1])[:count]]
