"""Whether a person watches standard error, and how long they wait there."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

QUIET_SECONDS = 2.0  # a wait as long as this needs no word


def has_live_terminal(environment: Mapping[str, str]) -> bool:
    """Whether lines on standard error can be written over, and a person watches them."""
    if environment.get("TERM", "dumb") in ("", "dumb", "unknown") or environment.get("CI"):
        return False
    try:
        return sys.stderr.isatty()
    except ValueError:  # it is closed
        return False


@contextmanager
def shows_seconds() -> Iterator[None]:
    """While this lasts, where a person watches: how long already, in a line that whatever is
    printed next writes over, from QUIET_SECONDS on."""
    if not has_live_terminal(os.environ):
        yield
        return
    is_done = threading.Event()
    ticking = threading.Thread(target=_tick, args=(is_done,), daemon=True)
    ticking.start()
    try:
        yield
    finally:
        is_done.set()
        ticking.join()


def _tick(is_done: threading.Event) -> None:
    started, wait = time.monotonic(), QUIET_SECONDS
    while not is_done.wait(wait):
        _write(f"{time.monotonic() - started:.0f} s")
        wait = 1.0
    _write("")


def _write(text: str) -> None:
    with suppress(OSError):  # nobody can read it
        print(f"{text}\x1b[K\r", end="", file=sys.stderr, flush=True)
