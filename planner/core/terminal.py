"""How a command waits: the seconds that it shows on standard error, and whether a person watches
there; and Python's garbage collector, which a process that ends with its answer can do without.
"""

import atexit
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

QUIET_SECONDS = 2.0  # nothing is shown of a shorter wait
SILENT_SECONDS = 10.0  # nor of one shorter than this where nobody watches
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
def shows_seconds(text: str = "Still working") -> Iterator[None]:
    """Within, shows how long it has taken. Where a person watches, from QUIET_SECONDS on in one
    line, which the next output overwrites; else in lines, at ever longer intervals."""
    if not _is_shown.acquire(blocking=False):  # one within another
        yield
        return
    is_done, is_live = threading.Event(), has_live_terminal(os.environ)
    ticking = threading.Thread(target=_tick, args=(is_done, text, is_live), daemon=True)
    ticking.start()
    try:
        yield
    finally:
        is_done.set()
        ticking.join()
        _is_shown.release()


def _tick(is_done: threading.Event, text: str, is_live: bool) -> None:
    started, wait = time.monotonic(), QUIET_SECONDS if is_live else SILENT_SECONDS
    while not is_done.wait(wait):
        passed = time.monotonic() - started
        _write(f"{text}: {passed:.0f} s" + ("\x1b[K\r" if is_live else ".\n"))
        wait = 1.0 if is_live else passed
    _write("\x1b[K\r" if is_live else "")


def _write(text: str) -> None:
    with suppress(OSError, ValueError):  # nobody can read it
        print(text, end="", file=sys.stderr, flush=True)


def collect_nothing() -> None:
    """Turns the garbage collector off. It would take a third of the time of an advice to look
    through all live objects, torch's modules above all, and a tenth as the interpreter ends."""
    gc.disable()
    atexit.register(gc.freeze)
