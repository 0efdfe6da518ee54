"""A log of any size, line by line: only what may matter is looked at, and little is kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import IO

from planner.core.failures import MAY_MATTER, OUT_OF_MEMORY, SIGNS, Sign, is_source
from planner.watching.explaining.allocator_message import AllocatorMessage, read_message
from planner.watching.explaining.finding import Finding

_CHUNK_BYTES = 1 << 20  # a line that is longer is cut
_FOLLOWING = 8  # lines that a message may go on over
_MAX_RANKS = 64
_MAX_LINE = 20_000  # characters that are searched
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_SPACES = re.compile(r"\s+")
_RANK = re.compile(
    r"^\W*(?:\[default(\d{1,6})\]|\[rank(\d{1,6})\]|\[Rank (\d{1,6})\]"
    r"|\[?(\d{1,4})\]?:(?=\s|\[))"
)
_RANK_WITHIN = re.compile(r"\[Rank (\d{1,6})\]")


class LogReading:
    """What was found: a finding of each kind, in the order of their first lines, and torch's
    messages by rank (the first of each is the cause; later ones follow from it)."""

    def __init__(self) -> None:
        self.findings: dict[str, Finding] = {}
        self.messages: dict[int | None, AllocatorMessage] = {}
        self._open: dict[int | None, list[str]] = {}  # messages that may go on, newest last

    def read(self, file: IO[bytes], encoding: str = "utf-8") -> LogReading:
        for number, line in _interesting(file, encoding):
            self._see(number, line)
        for rank in list(self._open):
            self._close(rank)
        return self

    @property
    def first(self) -> tuple[int | None, AllocatorMessage] | None:
        """The first message of the log, with its rank."""
        return next(iter(self.messages.items()), None)

    def _see(self, number: int, line: str) -> None:
        rank = rank_of(line)
        signs = () if is_source(line) else SIGNS
        kinds = {sign.kind for sign in signs if self._add(sign, number, line, rank)}
        if OUT_OF_MEMORY in kinds:
            self._close(rank)
            self._open[rank] = [line]
        elif self._open:
            self._go_on(rank, line)

    def _add(self, sign: Sign, number: int, line: str, rank: int | None) -> bool:
        """Whether the line has the sign. One that is sure takes the place of those that may be."""
        is_sure = sign.is_sure(line)
        if is_sure is None:
            return False
        found = self.findings.get(sign.kind)
        if found is None or (is_sure and found.apart):
            found = Finding(
                sign.kind, sign.means, todo=sign.todo, apart="" if is_sure else sign.apart
            )
            self.findings[sign.kind] = found
        if is_sure or found.apart:
            found.see(number, line, rank)
        return True

    def _go_on(self, rank: int | None, line: str) -> None:
        """A line of a rank belongs to its own message, one without a rank to the newest."""
        owner = rank if rank is not None else next(reversed(self._open))
        if owner in self._open:
            self._open[owner].append(_RANK.sub("", line))
            if len(self._open[owner]) > _FOLLOWING:
                self._close(owner)

    def _close(self, rank: int | None) -> None:
        """Lines were broken between words or within them: the reading that tells more is right."""
        lines = self._open.pop(rank, None)
        if lines is None or len(self.messages) >= _MAX_RANKS:
            return
        readings = (read_message(joint.join(lines)) for joint in (" ", ""))
        known = [reading for reading in readings if reading is not None]
        if known:
            self.findings[OUT_OF_MEMORY].apart = ""  # no other words have these figures
            self.messages.setdefault(rank, max(known, key=lambda reading: reading.num_known))


def rank_of(line: str) -> int | None:
    """The rank that a launcher or torch put before a line, or that the line speaks of."""
    found = _RANK.search(line) or _RANK_WITHIN.search(line)
    return next((int(text) for text in found.groups() if text), None) if found else None


def clean(line: str) -> str:
    """Without colours, progress bars' returns and spaces doubled by either. Those at the ends stay:
    a terminal breaks a line where it is full."""
    text = _ANSI.sub("", line[:_MAX_LINE]) if "\x1b" in line else line[:_MAX_LINE]
    return _SPACES.sub(" ", text)


def _interesting(file: IO[bytes], encoding: str) -> Iterator[tuple[int, str]]:
    """(number, line) of all lines near one that may matter."""
    number, follow = 1, 0
    for chunk in _chunks(file, encoding):
        words = [word for word in MAY_MATTER if word in chunk]
        if follow > 0 or words:
            for index, raw in enumerate(chunk.removesuffix(b"\n").split(b"\n")):
                if any(word in raw for word in words):
                    follow = _FOLLOWING + 1
                if follow > 0:
                    follow -= 1
                    yield number + index, clean(raw.decode("utf-8", errors="replace"))
        number += chunk.count(b"\n")


def _chunks(file: IO[bytes], encoding: str) -> Iterator[bytes]:
    """Pieces of whole lines in UTF-8."""
    import codecs

    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    rest = b""
    while data := file.read(_CHUNK_BYTES):
        if encoding != "utf-8":
            data = decoder.decode(data).encode()
        whole, newline, rest_of = (rest + data).rpartition(b"\n")
        if newline or len(rest_of) > _CHUNK_BYTES:
            yield whole + newline if newline else rest_of
            rest = rest_of if newline else b""
        else:
            rest = rest_of
    if rest:
        yield rest
