"""The libraries there are. To add one: a folder with a `room.py`, and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from planner.errors import unknown_name
from planner.libraries.microsoft.room import ROOM as MICROSOFT
from planner.libraries.native.room import ROOM as NATIVE
from planner.libraries.room import LibraryRoom
from planner.libraries.timm.room import ROOM as TIMM
from planner.libraries.torchvision.room import ROOM as TORCHVISION
from planner.libraries.transformers.room import ROOM as TRANSFORMERS

ROOMS: Mapping[str, LibraryRoom] = {
    room.name: room for room in (NATIVE, TIMM, TORCHVISION, TRANSFORMERS, MICROSOFT)
}


def find_library(name: str) -> LibraryRoom:
    """The room of the library called `name`. Raises UsageError."""
    if name not in ROOMS:
        raise unknown_name("library", name, ROOMS, f"Libraries: {', '.join(ROOMS)}.")
    return ROOMS[name]
