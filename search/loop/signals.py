"""The signals that end a search: the first one keeps what was measured, a second Ctrl-C ends it."""

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
    """The signals that came. The first raises KeyboardInterrupt, unless signals are held: then the
    next `interruptible` part raises it. So it does if Python dropped the exception, as it does with
    one that is raised in a destructor."""

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
        """The exit status of a process that a signal ended, as shells count it."""
        return 128 + (self.number or signal.SIGINT)


_active: list[Interrupts] = []


@contextmanager
def handle_signals(*numbers: signal.Signals) -> Iterator[Interrupts]:
    """Within, handles the signals `numbers`; nested in another such context, the outer one does.
    Signals that somebody else handles, or that are ignored (`nohup`), are left alone, and so are
    all of them outside the main thread, where Python handles none."""
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
    """Why a search ended that was ended by a KeyboardInterrupt."""
    return _active[-1].ending if _active else ENDINGS[signal.SIGINT]


def is_ending() -> bool:
    """Whether a signal has come that ends the search."""
    return bool(_active) and _active[-1].number is not None


@contextmanager
def held(is_held: bool = True) -> Iterator[None]:
    """Within, signals are held, except in parts that are `interruptible`."""
    interrupts = _active[-1] if _active else Interrupts()
    before, interrupts.is_held = interrupts.is_held, is_held
    try:
        if not is_held and interrupts.number is not None:
            raise KeyboardInterrupt
        yield
    finally:
        interrupts.is_held = before


def interruptible() -> AbstractContextManager[None]:
    """Within, a signal raises KeyboardInterrupt, also one that came while signals were held."""
    return held(False)
