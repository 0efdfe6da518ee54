"""A command on a terminal of its own: a real pseudo-terminal, whose screen pyte keeps."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Sequence

import pyte
import pyte.modes

PATIENCE_SECONDS = 120.0  # until a machine that is busy has come so far
UNSET = ("CI", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_INTERACTIVE")


class Terminal:
    """A context: leaving it ends what runs. `raw` is all that was written to it."""

    def __init__(self, command: Sequence[str], columns: int = 100, rows: int = 24) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=5000)
        self.stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.status: int | None = None
        known = {n: v for n, v in os.environ.items() if n not in UNSET}
        everything = {**known, "TERM": "xterm-256color"}
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.file, self.before = master, termios.tcgetattr(slave)
        self.process = os.fork()
        if self.process == 0:
            try:
                os.close(master)
                os.login_tty(slave)
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP):
                    signal.signal(number, signal.SIG_DFL)
                os.execvpe(command[0], list(command), everything)
            finally:
                os._exit(127)
        self.slave = slave  # kept open, so that settings can be read when the command has ended

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.status is None:
            os.kill(self.process, signal.SIGKILL)
            self.wait()
        for file in (self.file, self.slave):
            os.close(file)

    def see(self, seconds: float = 0.1) -> None:
        """Takes what is written within so long, or the first of it: to where the writer rests."""
        while select.select([self.file], [], [], seconds)[0]:
            data = os.read(self.file, 1 << 16)
            self.raw += data
            self.stream.feed(data)
            seconds = 0.02

    def await_seen(self, is_there: Callable[[], bool], what: str = "") -> None:
        patience = time.monotonic() + PATIENCE_SECONDS
        while not is_there():
            assert time.monotonic() < patience, f"{what} was not seen:\n{self.text()}"
            self.see()

    def press(self, keys: bytes) -> None:
        os.write(self.file, keys)

    def wait(self) -> int:
        """The exit status, once it has ended and all that it wrote is seen."""
        patience = time.monotonic() + PATIENCE_SECONDS
        while self.status is None:
            assert time.monotonic() < patience, self.text()
            self.see(0.02)
            ended, status = os.waitpid(self.process, os.WNOHANG)
            if ended:
                self.status = os.waitstatus_to_exitcode(status)
        while select.select([self.file], [], [], 0.05)[0]:
            self.see()
        return self.status

    def lines(self) -> list[str]:
        """All that scrolled away, and the screen."""
        gone = ["".join(line[x].data for x in range(self.screen.columns))
                for line in self.screen.history.top]  # fmt: skip
        return [line.rstrip() for line in [*gone, *self.screen.display]]

    def text(self) -> str:
        return "\n".join(self.lines())

    def table(self) -> list[str]:
        """The rows of the table that is on the screen; none of one that is half drawn."""
        rows = [row.rstrip() for row in self.screen.display]
        edges = [i for i, row in enumerate(rows) if row.startswith(("╭", "╰", "+-"))]
        assert sum(rows[i].startswith("╭") for i in edges) <= 1, self.text()
        return [row for row in rows[edges[0] :] if row] if len(edges) == 2 else []

    def await_table(self, *patterns: str) -> str:
        """The table, once it shows each of these regular expressions."""

        def is_there() -> bool:
            table = "\n".join(self.table())
            return bool(table) and all(re.search(p, table) for p in patterns)

        self.await_seen(is_there, " and ".join(["the table", *patterns]))
        return "\n".join(self.table())

    def assert_whole(self) -> None:
        """As a shell would want it back: what the command set is unset, and no table is left."""
        assert self.raw.rfind(b"\x1b[?25l") <= self.raw.rfind(b"\x1b[?25h")
        assert b"\x1b[?1049h" not in self.raw
        assert pyte.modes.DECTCEM in self.screen.mode, "the cursor is hidden"
        assert pyte.modes.DECAWM in self.screen.mode, "lines do not wrap"
        assert self.screen.cursor.x == 0, self.text()
        assert self.screen.cursor.attrs == self.screen.default_char, "a colour is left"
        below = self.screen.display[self.screen.cursor.y :]
        assert not "".join(below).strip(), self.text()
        assert not any(c in self.text() for c in "╭│╰"), self.text()
        assert termios.tcgetattr(self.slave) == self.before


def python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]
