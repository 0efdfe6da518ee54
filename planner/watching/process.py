"""Where a training runs: its rank, what is installed, the folder of its log. No torch."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from contextlib import suppress
from os import PathLike
from pathlib import Path

_PACKAGES = ("torch", "timm", "transformers", "lightning", "accelerate")


def folder_of(plan: object, folder: object) -> Path:
    if isinstance(folder, str | PathLike):
        return Path(folder)
    if isinstance(plan, str | PathLike):
        path = Path(plan)
        return path if path.is_dir() else path.parent
    return Path()


def rank_and_size() -> tuple[int, int]:
    """(rank, world size), by torch where a process group is there, else by the launcher's words."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return _number("RANK", 0), _number("WORLD_SIZE", 1)


def _number(name: str, otherwise: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else otherwise


def versions() -> dict[str, str]:
    from planner import __version__

    found = {"planner": __version__}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
