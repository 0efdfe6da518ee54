"""Python's cyclic collector in a process that ends with its answer."""

from __future__ import annotations

import atexit
import gc


def collect_once() -> None:
    """It runs only where it is asked for, and then passes over all that was alive the time
    before, torch's modules above all: otherwise it would take a fifth of the time. Nor does the
    interpreter pass over all that is alive as it ends, which would take a tenth."""
    gc.disable()
    if _freeze not in gc.callbacks:
        gc.callbacks.append(_freeze)
        atexit.register(gc.freeze)


def _freeze(phase: str, _: dict[str, int]) -> None:
    if phase == "stop":
        gc.freeze()
