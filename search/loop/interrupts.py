"""Signals that end a search early: the first ends it, and what was measured is kept whatever comes
after it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ENDINGS = {
    signal.SIGINT: "it was interrupted",
    signal.SIGTERM: "it was ended by SIGTERM",
    signal.SIGHUP: "its terminal was closed (SIGHUP)",
}

_AGAIN_SECONDS = 0.01


class Interrupts:
    """The signals heard. The first raises KeyboardInterrupt, unless it comes when all that is left
    is to keep what was found; those after it find the search ending already.

    Python drops what is raised in a destructor or in a weak reference's callback, wherever it
    happened to collect: a KeyboardInterrupt that was dropped so is raised again."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.is_held = self.is_due = False
        self._is_dropped = self._is_telling = False
        self._has_ended = threading.Event()

    def hear(self, number: int, frame: FrameType | None = None) -> None:
        if (self.number is not None and not self._is_dropped) or self._is_telling:
            return
        self._is_dropped = False
        self.number = number
        self.is_due = self.is_held
        if not self.is_held:
            raise KeyboardInterrupt

    def hear_dropped(self, dropped: Any, before: Callable[[Any], object]) -> None:
        """`sys.unraisablehook`; what is none of ours is left to the one `before`."""
        if self.number is None or not issubclass(dropped.exc_type, KeyboardInterrupt):
            before(dropped)
            return
        # Not from here, where it would be dropped too, however long a busy machine stays here.
        self._is_dropped = self._is_telling = True
        threading.Thread(target=self._tell_again, daemon=True).start()
        self._is_telling = False

    def _tell_again(self) -> None:
        """Until it is heard."""
        while self._is_dropped and not self._has_ended.wait(_AGAIN_SECONDS):
            signal.pthread_kill(threading.main_thread().ident or 0, self.number or signal.SIGINT)

    def end(self) -> None:
        """Nothing is told again from here on."""
        self._has_ended.set()

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
    hook = sys.unraisablehook
    if threading.current_thread() is threading.main_thread():
        usual = (signal.SIG_DFL, signal.default_int_handler)
        before = {n: h for n in numbers if (h := signal.getsignal(n)) in usual}
    _active.append(interrupts)
    try:
        for number in before:
            signal.signal(number, interrupts.hear)
        sys.unraisablehook = lambda dropped: interrupts.hear_dropped(dropped, hook)
        yield interrupts
    finally:
        sys.unraisablehook = hook
        interrupts.end()
        _active.remove(interrupts)
        for number, handler in before.items():
            signal.signal(number, handler)


def ending() -> str:
    """Why a search ended that a KeyboardInterrupt has ended."""
    return _active[-1].ending if _active else ENDINGS[signal.SIGINT]


def is_ending() -> bool:
    """Whether a signal has come that ends the search."""
    return any(interrupts.number is not None for interrupts in _active)


@contextmanager
def unbroken() -> Iterator[None]:
    """What is done in here is done whole: a signal that comes meanwhile raises after it. A database
    whose statement is broken off says so, on standard error, in a traceback of its own."""
    is_main = threading.current_thread() is threading.main_thread()
    holding = [i for i in _active if is_main and not i.is_held]
    for interrupts in holding:
        interrupts.is_held = True
    try:
        yield
    finally:
        for interrupts in holding:
            interrupts.is_held = False
    for interrupts in holding:
        if interrupts.is_due:
            interrupts.is_due = False
            raise KeyboardInterrupt


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
