"""A log of any size, line by line: only what may matter is looked at, and little is kept."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from planner.core import failures
from planner.core.failures import OUT_OF_MEMORY, Sign
from planner.watching.explaining.failed_request import FailedRequest, read_message

MAX_EVIDENCE = 3  # lines shown of one finding
MAX_SHOWN = 300  # characters of one
MANY = 100_000  # lines of a kind that are counted; it is not looked for in later ones
_CHUNK_BYTES = 1 << 20
_FOLLOWING = 8  # lines that a message may go on over
_BETWEEN = 100  # lines of other ranks that may lie within a message
_MAX_RANKS = 64
_MAX_LINE = 20_000  # characters that are searched
_ANSI = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)")
_SPACES = re.compile(r"\s+")
_RANK = re.compile(failures.SAID["log"]["rank"])
_RANK_WITHIN = re.compile(r"\[Rank (\d{1,6})\]")
_TORCH = re.compile(failures.SAID["log"]["torch"].encode())
_MEMORY = re.compile(failures.SAID["log"]["memory"].encode(), re.MULTILINE)
_FEW_READINGS = 8


@dataclass
class Finding:
    """Something that was recognised: its `kind`, what it means in a sentence, the lines that say so
    (number from 1 and text; the first ones), how often it was there, in which ranks, the figures
    read from it, and what to do. `apart` is empty where the lines cannot mean anything else;
    otherwise it is only possible, and this is what would tell."""

    kind: str
    means: str
    evidence: list[tuple[int, str]] = field(default_factory=list)
    count: int = 0
    ranks: tuple[int, ...] = ()
    figures: dict[str, Any] = field(default_factory=dict)
    todo: tuple[str, ...] = ()
    apart: str = ""

    def see(self, number: int, text: str, rank: int | None) -> None:
        self.count += 1
        if len(self.evidence) < MAX_EVIDENCE:
            shown = text.strip()
            cut = f"{shown[:MAX_SHOWN]}…" if len(shown) > MAX_SHOWN else shown
            self.evidence.append((number, cut))
        if rank is not None and rank not in self.ranks:
            self.ranks = tuple(sorted((*self.ranks, rank)))[:64]

    def as_json(self) -> dict[str, Any]:
        evidence = [{"line": number, "text": text} for number, text in self.evidence]
        return {**vars(self), "certain": not self.apart, "evidence": evidence}


@dataclass
class Column:
    """Readings since they last fell: how many, and each new height with the number of its reading
    and of its line."""

    count: int = 0
    levels: list[tuple[int, float, int]] = field(default_factory=list)

    def read(self, value: float, line: int) -> None:
        if self.levels and value < self.levels[-1][1]:
            self.count, self.levels = 0, []
        if not self.levels or value > self.levels[-1][1]:
            self.levels.append((self.count, value, line))
        self.count += 1

    @property
    def grows(self) -> bool:
        """Whether it rose in the second half as it did in the first. The highest so far of sizes
        drawn at random rises ever more rarely: in the second half of n by ln 2 times on average."""
        later = [level for level in self.levels if 2 * level[0] >= self.count - 1]
        if len(later) < (3 if self.count < _FEW_READINGS else 4):
            return False
        first, last = self.levels[0][1], self.levels[-1][1]
        return 3 * (last - self.levels[-len(later) - 1][1]) >= last - first


class LogReading:
    """What was found: a finding of each kind, in the order of their first lines, and torch's
    messages by rank (the first of each is the cause; later ones follow from it)."""

    def __init__(self) -> None:
        self.findings: dict[str, Finding] = {}
        self.messages: dict[int | None, FailedRequest] = {}
        self.torch: failures.Versions = failures.ANY_TORCH
        self.is_windows = False
        self._open: dict[int | None, list[str]] = {}  # messages that may go on, newest last
        self._opened_at = 0
        self._columns: dict[bytes, Column] = {}

    def read(self, file: IO[bytes]) -> LogReading:
        number = 1
        for chunk in _chunks(file):
            self._read_chunk(number, chunk)
            number += chunk.count(b"\n")
        for rank in list(self._open):
            self._close(rank)
        self._judge()
        return self

    @property
    def first(self) -> tuple[int | None, FailedRequest] | None:
        """The first message of the log, with its rank."""
        return next(iter(self.messages.items()), None)

    def _read_chunk(self, number: int, chunk: bytes) -> None:
        """A chunk has few of the words, and most of its lines none: plain words are found faster
        than patterns. What a log says many thousand times is not counted to its end."""
        if b"\x1b" in chunk:  # colours, also within a word
            chunk = _ANSI.sub(b"", chunk)
        counted = {kind for kind, found in self.findings.items() if found.count >= MANY}
        looked_for = (sign for sign in failures.SIGNS if sign.kind not in counted)
        here = [(word, sign) for sign in looked_for for word in sign.words if word in chunk]
        if here or self._open:
            for index, raw in enumerate(chunk.removesuffix(b"\n").split(b"\n")):
                signs = {sign.kind: sign for word, sign in here if word in raw}
                if signs or self._open:
                    self._see(number + index, clean(raw), signs.values())
        self.is_windows |= b"\\site-packages\\" in chunk
        is_known = self.torch != failures.ANY_TORCH or b"orch" not in chunk
        if not is_known and (found := _TORCH.search(chunk)):
            version = int(found[1]), int(found[2])
            self.torch = version, version
        line, position = number, 0
        for match in _MEMORY.finditer(chunk):
            line += chunk.count(b"\n", position, match.start())
            position = match.start()
            column = self._columns.setdefault(match[1] or b"GPU_mem", Column())
            column.read(float(match[2] or match[3]), line)

    def _see(self, number: int, line: str, signs: Iterable[Sign]) -> None:
        """One that is sure takes the place of those that may be."""
        rank = rank_of(line)
        for sign in () if failures.is_source(line) else signs:
            is_sure = sign.is_sure(line)
            if is_sure is None:
                continue
            found = self.findings.get(sign.kind)
            if found is None or (is_sure and found.apart):
                found = Finding(sign.kind, sign.means, apart="" if is_sure else sign.apart)
                self.findings[sign.kind] = found
            if is_sure or found.apart:
                found.see(number, line, rank)
            if sign.kind == OUT_OF_MEMORY:
                self._close(rank)
                self._open[rank], self._opened_at = [], number
        # A line of a rank belongs to its own message, one without a rank to the newest.
        owner = rank if rank is not None else next(reversed(self._open), None)
        if owner in self._open:
            self._open[owner].append(_RANK.sub("", line))
        for other, lines in list(self._open.items()):
            if len(lines) > _FOLLOWING or number - self._opened_at > _BETWEEN:
                self._close(other)

    def _close(self, rank: int | None) -> None:
        """Lines were broken between words or within them: the reading that tells more is right."""
        lines = self._open.pop(rank, [])
        readings = (read_message(joint.join(lines)) for joint in (" ", ""))
        known = [reading for reading in readings if reading is not None]
        if known and len(self.messages) < _MAX_RANKS:
            self.findings[OUT_OF_MEMORY].apart = ""  # no other words have these figures
            self.messages.setdefault(rank, max(known, key=lambda reading: len(reading.known)))

    def _judge(self) -> None:
        """What only the whole log shows: its torch, what that has to offer, a memory that grew."""
        failed = self.first[1] if self.first else None
        if failed is not None and not failed.torch[0] <= self.torch[0] <= failed.torch[1]:
            self.torch = failed.torch
        for found in self.findings.values():
            found.todo = failures.BY_KIND[found.kind].told(self.torch)
        out = self.findings.get(OUT_OF_MEMORY)
        if out is None or out.apart:
            return
        if failed is not None:
            oldest, newest = self.torch
            if self.is_windows:  # where expandable segments are not: what torch 2.0 had is
                oldest, newest = min(oldest, (2, 0)), min(newest, (2, 0))
            out.figures, out.todo = failed.figures, failed.ways_out((oldest, newest))
        grown = [(name, column) for name, column in self._columns.items() if column.grows]
        if grown:
            name, column = max(grown, key=lambda one: len(one[1].levels))
            sign = failures.BY_KIND[failures.GROWTH]
            grew = Finding(sign.kind, sign.means, todo=sign.told(), apart=sign.apart)
            for _, value, line in (column.levels[0], column.levels[-1]):
                grew.see(line, f"{name.decode()} {value:g}", None)
            grew.count = column.count
            self.findings[grew.kind] = grew


def rank_of(line: str) -> int | None:
    """The rank that a launcher or torch put before a line, or that the line speaks of."""
    found = _RANK.search(line) or _RANK_WITHIN.search(line)
    return next((int(text) for text in found.groups() if text), None) if found else None


def clean(raw: bytes) -> str:
    """Without progress bars' returns and doubled spaces. Those at the ends stay: a terminal breaks
    a line where it is full."""
    return _SPACES.sub(" ", raw[: 4 * _MAX_LINE].decode("utf-8", errors="replace")[:_MAX_LINE])


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    """Pieces that end with a line; a longer line is cut."""
    while data := file.read(_CHUNK_BYTES):
        yield data + file.readline(_CHUNK_BYTES)
