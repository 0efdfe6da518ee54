"""Which torch an estimate is for: the installed one, else the newest that was tried.

What torch allocates changes with its versions. A law that differs names the version from which it
holds and asks `torch_version()`, which reads the installed package's metadata and imports nothing.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import metadata

OLDEST_TRIED, NEWEST_TRIED = (2, 9), (2, 15)


@cache
def installed_version(package: str) -> str:
    """The version of an installed package; "" where there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


_asked: ContextVar[tuple[int, int] | None] = ContextVar("the torch that is asked for", default=None)


def torch_version() -> tuple[int, int]:
    """(major, minor) of the torch that an estimate is for: `as_of`'s, else the installed one's,
    else `NEWEST_TRIED`."""
    return _asked.get() or _release(installed_version("torch")) or NEWEST_TRIED


@contextmanager
def as_of(version: str) -> Iterator[None]:
    """Within, estimates are for torch `version`, as a record has it ("2.13.0+cu130"); for the
    installed one where that names no version."""
    token = _asked.set(_release(version))
    try:
        yield
    finally:
        _asked.reset(token)


def why_untried(version: str) -> str | None:
    """What to say of a torch that was not tried; None for one that was, and for no torch ("")."""
    release = _release(version)
    if release is None:
        return None
    low, high = (".".join(map(str, found)) for found in (OLDEST_TRIED, NEWEST_TRIED))
    tried = f"estimates were tried with torch {low} to {high}"
    if not OLDEST_TRIED <= release <= NEWEST_TRIED:
        return f"{tried}; this is {version}"
    # 2.9.0a0+145a3a7bda.nv25.10, 2.16.0.dev20261101+cu132, 2.15.0rc3; not what follows a plus.
    if re.search(r"\d(a|b|rc|\.dev)\d", version.partition("+")[0]):
        return f"{tried}, as released; this is {version}, a pre-release"
    return None


@cache
def _release(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None
