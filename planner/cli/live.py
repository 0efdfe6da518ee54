"""A live table on the terminal of standard error, drawn by a thread of its own.

Only that thread writes: a signal interrupts the main thread, and so never a half-written line. It
hides no cursor, opens no other screen and asks the terminal nothing, so there is nothing to put
back. After each frame the cursor stands at the table's first column and row: all from there on is
the table's, however a terminal wraps its lines when it is made narrower, and one escape erases it.

Nothing is forked while the thread lives but to run another program at once (subprocess): workers
are forked by the fork server, a program of its own.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Self, TextIO

from planner.cli.progress import WAY_OUT, Show
from planner.errors import printable
from planner.report.standing import Standing
from search.interrupts import is_ending

FIRST_SECONDS = 0.3  # a search that ends sooner shows no table
LOOK_SECONDS = 0.25  # between looks at the clock and at the terminal's size
FRAME_SECONDS = 0.05  # the shortest between two frames
PATIENCE_SECONDS = 5.0  # for a terminal that takes nothing (Ctrl-S), before it is left behind
ENDING = "ending: what was measured is kept"
_TO_START, _ERASE_BELOW, _ERASE_REST = "\r", "\x1b[J", "\x1b[K"
_WRAP_OFF, _WRAP_ON = "\x1b[?7l", "\x1b[?7h"  # a sign that is wider than it was taken for

Handler = Callable[[int, FrameType | None], None]
Message = str | Standing | threading.Event | None  # a line; a standing; pause; the end


class LiveTable(Show):
    """Ended probes as lines that scroll away, and under them the table."""

    def __init__(self, heading: str = "", way_out: str = WAY_OUT) -> None:
        super().__init__(heading, way_out)
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.is_paused = False
        self.screen = Screen(sys.stderr)
        self.drawn = self.standing
        self.thread = threading.Thread(target=self._run, name="live table", daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        self.stderr, sys.stderr = sys.stderr, _Lines(self, sys.stderr)
        self.hears_stop = _hear_stop(self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        """Erases the table. An interrupt that comes meanwhile is raised once that is done."""
        if self.hears_stop:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        sys.stderr.flush()
        sys.stderr = self.stderr
        self.messages.put(None)
        try:
            self.thread.join(PATIENCE_SECONDS)
        except KeyboardInterrupt:
            self.thread.join(PATIENCE_SECONDS)
            raise

    def say(self, line: str) -> None:
        self.messages.put(line)

    def stand(self, standing: Standing) -> None:
        super().stand(standing)
        self.messages.put(standing)

    def _run(self) -> None:
        first_at = time.monotonic() + FIRST_SECONDS
        while True:
            lines, has_ended = self._take()
            with contextlib.suppress(OSError):  # nobody can be shown anything
                self._show(lines, is_early=time.monotonic() < first_at, has_ended=has_ended)
            if has_ended:
                return
            time.sleep(FRAME_SECONDS)

    def _take(self) -> tuple[list[str], bool]:
        """The lines that came, once something has or it is time to look; whether the end did."""
        lines: list[str] = []
        wait = LOOK_SECONDS
        while True:
            try:
                message = self.messages.get(timeout=wait)
            except queue.Empty:
                return lines, False
            wait = 0.0
            if message is None:
                return lines, True
            if isinstance(message, str):
                lines.append(message)
            elif isinstance(message, Standing):
                self.drawn = message
            else:
                with contextlib.suppress(OSError):
                    self.screen.show([], [])
                message.set()

    def _show(self, lines: list[str], is_early: bool, has_ended: bool) -> None:
        if is_early or has_ended or self.is_paused or not self.screen.is_in_front():
            self.screen.show(lines, [])
            return
        # The last column stays free, and a row for the line above.
        columns, rows = self.screen.size()
        self.screen.show(lines, self._table(columns - 1, rows - 1))

    def _table(self, width: int, height: int) -> list[str]:
        from planner.report.live_table import live_lines

        drawn = replace(self.drawn, way_out=ENDING) if is_ending() else self.drawn
        return live_lines(drawn, time.monotonic(), width, height, self.screen.encoding)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: the shell finds a whole terminal, and `fg` the table again."""
        self.is_paused = True
        erased = threading.Event()
        self.messages.put(erased)
        erased.wait(1.0)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # goes on here after SIGCONT
        signal.signal(number, self._stop)
        self.is_paused = False


def _hear_stop(handler: Handler) -> bool:
    """Whether Ctrl-Z is heard from here on: where nobody else does, nor ignores it."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTSTP) != signal.SIG_DFL:
        return False
    signal.signal(signal.SIGTSTP, handler)
    return True


class Screen:
    """The terminal: lines that stay, and a table below them that each frame writes anew."""

    def __init__(self, stream: TextIO) -> None:
        stream.flush()
        self.file = stream.fileno()
        self.encoding = stream.encoding or "ascii"
        self.table: list[str] = []

    def size(self) -> tuple[int, int]:
        """Columns and rows; the usual ones where the terminal knows none."""
        columns, rows = os.get_terminal_size(self.file)
        return columns or 80, rows or 24

    def is_in_front(self) -> bool:
        """Whether the shell has put this command in front of the terminal (not `&` or `bg`)."""
        try:
            return os.tcgetpgrp(self.file) == os.getpgrp()
        except OSError:  # it is not this session's terminal
            return True

    def show(self, lines: list[str], table: list[str]) -> None:
        """One write: `lines` in place of the table, and under them the new one. Raises OSError."""
        if not lines and table == self.table:
            return
        said = "".join(f"{printable(line)}\n" for line in lines)
        # Ctrl-C drops what the terminal has not taken yet, and so perhaps the end of a frame.
        erase = _WRAP_ON + _TO_START + _ERASE_BELOW if self.table and (lines or not table) else ""
        self.table = table
        self._write(erase + said + _frame(table))

    def _write(self, text: str) -> None:
        data = text.encode(self.encoding, "backslashreplace")
        while data:
            try:
                data = data[os.write(self.file, data) :]
            except BlockingIOError:  # somebody who shares the terminal made it so
                select.select([], [self.file], [], 1.0)


def _frame(table: list[str]) -> str:
    """The table's rows over what was there, and back to the first of them."""
    if not table:
        return ""
    rows = f"{_ERASE_REST}\n".join(table)
    up = f"\x1b[{len(table) - 1}A" if len(table) > 1 else ""
    return f"{_WRAP_OFF}{_TO_START}{rows}{_ERASE_BELOW}{_WRAP_ON}{up}{_TO_START}"


class _Lines(io.TextIOBase):
    """Standard error while the table is there: what others print is a line above it."""

    def __init__(self, show: LiveTable, stream: TextIO) -> None:
        self.show, self.stream, self.rest = show, stream, ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self.stream.errors

    def fileno(self) -> int:
        return self.stream.fileno()

    def isatty(self) -> bool:
        return self.stream.isatty()

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        """Half a line is one when nothing more comes: Python flushes at a line's end and to ask."""
        if self.rest:
            self.write("\n")

    def write(self, text: str) -> int:
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            self.show.say(line)
        return len(text)
