"""Signals that end a search early: the first ends it, and what was measured is kept whatever comes
after it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDINGS = {
    signal.SIGINT: "it was interrupted",
    signal.SIGTERM: "it was ended by SIGTERM",
    signal.SIGHUP: "its terminal was closed (SIGHUP)",
}


class Interrupts:
    """The signals heard. The first raises KeyboardInterrupt, unless it comes when all that is left
    is to keep what was found; those after it find the search ending already."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.is_held = False

    def hear(self, number: int, frame: FrameType | None = None) -> None:
        if self.number is not None:
            return
        self.number = number
        if not self.is_held:
            raise KeyboardInterrupt

    @property
    def ending(self) -> str:
        """Why the search ended."""
        return ENDINGS[signal.Signals(self.number or signal.SIGINT)]

    @property
    def exit_status(self) -> int:
        """As shells count a process that was ended by a signal."""
        return 128 + (self.number or signal.SIGINT)


_active: list[Interrupts] = []


@contextmanager
def heard(*numbers: signal.Signals) -> Iterator[Interrupts]:
    """Hears `numbers` until it is left; within another, that one goes on hearing.

    Signals that somebody else handles, or that are ignored (`nohup`), are left alone, and so are
    all outside the main thread, where Python lets no one handle them.
    """
    if _active:
        yield _active[-1]
        return
    interrupts = Interrupts()
    before = {}
    if threading.current_thread() is threading.main_thread():
        usual = (signal.SIG_DFL, signal.default_int_handler)
        before = {n: h for n in numbers if (h := signal.getsignal(n)) in usual}
    _active.append(interrupts)
    try:
        for number in before:
            signal.signal(number, interrupts.hear)
        yield interrupts
    finally:
        _active.remove(interrupts)
        for number, handler in before.items():
            signal.signal(number, handler)


def ending() -> str:
    """Why a search ended that a KeyboardInterrupt has ended."""
    return _active[-1].ending if _active else ENDINGS[signal.SIGINT]


def is_ending() -> bool:
    """Whether a signal has come that ends the search."""
    return any(interrupts.number is not None for interrupts in _active)


def hold() -> None:
    """From here on no signal raises: what was found is being kept."""
    for interrupts in _active:
        interrupts.is_held = True


def let_go() -> bool:
    """From here on signals raise again: another part of the search begins. False where one has
    come: then the search is ending."""
    for interrupts in _active:
        if interrupts.number is not None:
            return False
        interrupts.is_held = False
    return True
