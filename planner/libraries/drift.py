"""Whether an installed library is still the one that was transcribed.

Each library's shapes were written beside one version's source files. `transcribed.json` in its
folder has the sha256 of those files, for each version of Swin; here the installed files are read
and compared, without importing the library.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

HASHES = "transcribed.json"


@cache
def drift_notes(library: str, swin_version: int, folder: Path | None) -> tuple[str, ...]:
    """What to say where a file below `folder` is not the one that was transcribed.

    `folder` is the installed library's, or None where it is not installed, which says nothing.
    """
    transcribed = _read(library)
    if folder is None or transcribed is None:
        return ()
    differing = [
        name.rpartition("/")[2]
        for name, digest in transcribed["files"][str(swin_version)].items()
        if _digest(folder / name) != digest
    ]
    if not differing:
        return ()
    source, verb = transcribed["source"], "differs" if len(differing) == 1 else "differ"
    return (
        f"transcribed from {source} {transcribed['version']}; {_installed(library)} is installed "
        f"and its {', '.join(differing)} {verb}: check with --record",
    )


def package_folder(package: str) -> Path | None:
    """Where a package is installed, without importing it; None where it is not."""
    try:
        found = importlib.util.find_spec(package)
    except ValueError:  # somebody put a module without a spec into sys.modules
        return None
    places = found.submodule_search_locations if found is not None else None
    return Path(next(iter(places))) if places else None


def _read(library: str) -> Mapping[str, Any] | None:
    """None for our own Swin, which is transcribed from nothing."""
    file = Path(__file__).parent / library / HASHES
    if not file.is_file():
        return None
    found: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _digest(file: Path) -> str | None:
    """None where the library has no such file any more."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


def _installed(library: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # takes longer than the hashes

    try:
        return version(library)
    except PackageNotFoundError:  # a checkout, or a folder on PYTHONPATH
        return "another version"
