"""Whether a person watches standard error, and how long they wait there; and Python's cyclic
collector in a process that ends with its answer.
"""

import atexit
import gc
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
def shows_seconds(said: str = "Still working") -> Iterator[None]:
    """While this lasts: how long already. Where a person watches, in a line that whatever is
    printed next writes over, from QUIET_SECONDS on; else in lines, ever fewer of them."""
    if not _is_shown.acquire(blocking=False):  # one within another
        yield
        return
    is_done, is_live = threading.Event(), has_live_terminal(os.environ)
    ticking = threading.Thread(target=_tick, args=(is_done, said, is_live), daemon=True)
    ticking.start()
    try:
        yield
    finally:
        is_done.set()
        ticking.join()
        _is_shown.release()


def _tick(is_done: threading.Event, said: str, is_live: bool) -> None:
    started, wait = time.monotonic(), QUIET_SECONDS if is_live else SILENT_SECONDS
    while not is_done.wait(wait):
        passed = time.monotonic() - started
        _write(f"{said}: {passed:.0f} s" + ("\x1b[K\r" if is_live else ".\n"))
        wait = 1.0 if is_live else passed
    _write("\x1b[K\r" if is_live else "")


def _write(text: str) -> None:
    with suppress(OSError, ValueError):  # nobody can read it
        print(text, end="", file=sys.stderr, flush=True)


def collect_nothing() -> None:
    """Python's cyclic collector would take a third of the time of an advice, looking through all
    that is alive, torch's modules above all; and a tenth as the interpreter ends."""
    gc.disable()
    atexit.register(gc.freeze)
