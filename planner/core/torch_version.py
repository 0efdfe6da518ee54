"""Which torch an estimate is of: the one that is installed, else the newest that was tried.

What torch allocates moves with its versions. Laws that differ name the version from which they hold
and ask `torch_version()`, which reads the installed package's metadata and imports nothing.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import metadata

OLDEST_TRIED, NEWEST_TRIED = (2, 9), (2, 15)


@cache
def installed_torch() -> str:
    """The version of the torch installed here; "" where there is none."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


_asked: ContextVar[tuple[int, int] | None] = ContextVar("the torch that is asked for", default=None)


def torch_version() -> tuple[int, int]:
    """(major, minor) of the torch that an estimate is of: `as_of`'s, else the one installed here;
    `NEWEST_TRIED` where there is none."""
    return _asked.get() or _installed_release() or NEWEST_TRIED


@contextmanager
def as_of(version: str) -> Iterator[None]:
    """Within it estimates are of torch `version`, as a record has it ("2.13.0+cu130"); of what is
    installed where it names none."""
    token = _asked.set(_release(version))
    try:
        yield
    finally:
        _asked.reset(token)


@cache
def _installed_release() -> tuple[int, int] | None:
    return _release(installed_torch())


def why_untried(version: str) -> str | None:
    """What to say of a torch that was not tried; None of one that was, and of none ("")."""
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


def _release(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None
