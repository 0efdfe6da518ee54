"""Links that were measured on this machine, kept in the user's cache for later estimates."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from planner.environment.rates import installed_torch
from planner.files import cache_file
from planner.hardware.link_file import write_link
from planner.schema.link import LINK_FORMAT, LinkCurve


def save_link(curve: LinkCurve) -> Path:
    """Keep `curve` for `load_link`: one file for each device, number of ranks and torch. Raises
    OSError where the cache cannot be written."""
    path = link_path(curve.device, curve.world_size)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_link(path, curve)
    return path


def load_link(device: str, world_size: int) -> LinkCurve | None:
    """The link kept between so many devices of this name under this torch; None where none was
    measured, or what was kept is of another format or damaged."""
    try:
        text = link_path(device, world_size).read_text(encoding="utf-8")
        curve = LinkCurve.model_validate_json(text)
    except (OSError, ValidationError, UnicodeDecodeError):
        return None
    return curve if curve.link_format == LINK_FORMAT and curve.points else None


def link_path(device: str, world_size: int) -> Path:
    """The file that holds the link between `world_size` devices called `device`."""
    return cache_file("links", f"{world_size} x {device} torch {installed_torch()}")
