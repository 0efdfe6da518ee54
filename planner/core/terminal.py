"""Whether a person watches standard error, and how long they wait there."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

QUIET_SECONDS = 2.0  # a wait as long as this needs no word
SILENT_SECONDS = 10.0  # nor one as long as this where nobody watches
_is_shown = threading.Lock()


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
    """While this lasts: how long already. Where a person watches, in a line that whatever is
    printed next writes over, from QUIET_SECONDS on; else in lines, ever fewer of them."""
    if not _is_shown.acquire(blocking=False):  # one within another
        yield
        return
    is_done = threading.Event()
    tick = _tick if has_live_terminal(os.environ) else _tell
    ticking = threading.Thread(target=tick, args=(is_done,), daemon=True)
    ticking.start()
    try:
        yield
    finally:
        is_done.set()
        ticking.join()
        _is_shown.release()


def _tell(is_done: threading.Event) -> None:
    passed = SILENT_SECONDS
    while not is_done.wait(passed if passed == SILENT_SECONDS else passed / 2):
        with suppress(OSError, ValueError):
            print(f"Still working after {passed:.0f} s.", file=sys.stderr, flush=True)
        passed *= 2


def _tick(is_done: threading.Event) -> None:
    started, wait = time.monotonic(), QUIET_SECONDS
    while not is_done.wait(wait):
        _write(f"{time.monotonic() - started:.0f} s")
        wait = 1.0
    _write("")


def _write(text: str) -> None:
    with suppress(OSError):  # nobody can read it
        print(f"{text}\x1b[K\r", end="", file=sys.stderr, flush=True)
