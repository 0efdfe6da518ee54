"""Links that were measured on this machine, kept in the user's cache for later estimates."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from planner.core.files import cache_directory, cache_file
from planner.core.schema.link import LINK_FORMAT, LinkCurve
from planner.core.torch_version import installed_torch
from planner.machine.hardware import Gpu, recognise_gpu
from planner.machine.hardware.link_file import write_link


def save_link(curve: LinkCurve) -> Path:
    """Keep `curve` for `kept_link`: one file for each device, number of ranks and torch. Raises
    OSError where the cache cannot be written."""
    path = link_path(curve.device, curve.world_size)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_link(path, curve)
    return path


def kept_link(gpu: Gpu, num_gpus: int) -> Path | None:
    """The file of a link that was measured here between so many of `gpu` or more, the fewest of
    them first, under this torch; None where there is none."""
    found = []
    for path in sorted((cache_directory() / "links").glob("*.json")):
        curve = _read(path)
        if curve is None or curve.backend != "nccl" or curve.world_size < num_gpus:
            continue
        if link_path(curve.device, curve.world_size) != path:  # of another torch
            continue
        if recognise_gpu(curve.device, gpu.memory_bytes) == gpu:
            found.append((curve.world_size, path))
    return min(found)[1] if found else None


def _read(path: Path) -> LinkCurve | None:
    try:
        curve = LinkCurve.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError, UnicodeDecodeError):
        return None
    return curve if curve.link_format == LINK_FORMAT and curve.points else None


def link_path(device: str, world_size: int) -> Path:
    """The file that holds the link between `world_size` devices called `device`."""
    return cache_file("links", f"{world_size} x {device} torch {installed_torch() or 'none'}")
