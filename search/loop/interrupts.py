"""Signals that end a search early: the first ends it, and what was measured is kept; a second
Ctrl-C ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

ENDINGS = {
    signal.SIGINT: "it was interrupted",
    signal.SIGTERM: "it was ended by SIGTERM",
    signal.SIGHUP: "its terminal was closed (SIGHUP)",
}


class Interrupts:
    """The signals heard. The first raises KeyboardInterrupt, unless they are held: then it is seen
    where the next `interruptible` part would begin. Python drops what is raised in a destructor,
    wherever it happened to collect: that is seen there too."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.is_held = False

    def hear(self, number: int, frame: FrameType | None = None) -> None:
        is_second = self.number is not None
        self.number = self.number or number
        if number == signal.SIGINT if is_second else not self.is_held:
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
def handle_signals(*numbers: signal.Signals) -> Iterator[Interrupts]:
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
    return bool(_active) and _active[-1].number is not None


@contextmanager
def held(is_held: bool = True) -> Iterator[None]:
    """What is done in here is done whole, but for what is `interruptible` in it."""
    interrupts = _active[-1] if _active else Interrupts()
    before, interrupts.is_held = interrupts.is_held, is_held
    try:
        if not is_held and interrupts.number is not None:
            raise KeyboardInterrupt
        yield
    finally:
        interrupts.is_held = before


def interruptible() -> AbstractContextManager[None]:
    """A signal that comes in here, or came while signals were held, raises KeyboardInterrupt."""
    return held(False)
