"""The libraries whose Swins are on shapes. To add one: a folder with a `spec.py`, a line here."""

from __future__ import annotations

from collections.abc import Mapping

from planner.core.errors import unknown_name
from planner.libraries.microsoft.spec import SPEC as MICROSOFT
from planner.libraries.native.spec import SPEC as NATIVE
from planner.libraries.spec import LibrarySpec
from planner.libraries.timm.spec import SPEC as TIMM

SPECS: Mapping[str, LibrarySpec] = {spec.name: spec for spec in (NATIVE, TIMM, MICROSOFT)}


def find_library(name: str) -> LibrarySpec:
    """The spec of the library called `name`. Raises UsageError."""
    if name not in SPECS:
        raise unknown_name("library", name, SPECS, f"Libraries: {', '.join(SPECS)}.")
    return SPECS[name]
