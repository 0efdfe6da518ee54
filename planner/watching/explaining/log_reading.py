"""A log of any size, line by line: only what may matter is looked at, and little is kept."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise
from typing import IO, Any

from planner.core import failures
from planner.core.failures import OUT_OF_MEMORY, Sign
from planner.watching.explaining.failed_request import FailedRequest, read_message

MAX_EVIDENCE = 3  # lines shown of one finding
MAX_SHOWN = 300  # characters of one
MANY = 100_000  # lines of a kind that are counted; it is not looked for in later ones
_CHUNK_BYTES = 1 << 20
_FOLLOWING = 9  # lines that a message may be on
_BETWEEN = 100  # lines that it lies in, with those of other ranks
_MAX_LINE = 20_000  # characters that are searched
_ANSI = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)")
_SPACES = re.compile(r"\s+")
_RANK = re.compile(failures.SAID["log"]["rank"])
_RANK_WITHIN = re.compile(r"\[Rank (\d{1,6})\]")
_TORCH = re.compile(failures.SAID["log"]["torch"].encode())
_MEMORY = re.compile(failures.SAID["log"]["memory"].encode(), re.MULTILINE)
_FEWEST = 3


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


Level = tuple[int, float]  # the number of a line, and what its column of memory rose to


class LogReading:
    """What was found: a finding of each kind, in the order of their first lines, and torch's first
    message that has figures, with its rank (the later ones follow from it)."""

    def __init__(self) -> None:
        self.findings: dict[str, Finding] = {}
        self.failed: FailedRequest | None = None
        self.rank: int | None = None
        self.torch: failures.Versions = failures.ANY_TORCH
        self.is_windows = False
        self._columns: dict[bytes, list[Level]] = {}

    def read(self, file: IO[bytes]) -> LogReading:
        number = 1
        for chunk, ahead in pairwise(chain(_chunks(file), [b""])):
            self._read_chunk(number, chunk, ahead)
            number += chunk.count(b"\n")
        self._judge()
        return self

    def _read_chunk(self, number: int, chunk: bytes, ahead: bytes) -> None:
        """A chunk has few of the words, and most of its lines none: plain words are found faster
        than patterns. What a log says many thousand times is not counted to its end."""
        counted = {kind for kind, found in self.findings.items() if found.count >= MANY}
        looked_for = (sign for sign in failures.SIGNS if sign.kind not in counted)
        here = [(word, sign) for sign in looked_for for word in sign.words if word in chunk]
        if here:
            lines = chunk.removesuffix(b"\n").split(b"\n")
            followed = lines + ahead.split(b"\n", _BETWEEN)[:_BETWEEN]
            for index, raw in enumerate(lines):
                signs = {sign.kind: sign for word, sign in here if word in raw}
                if signs:
                    self._see(number + index, followed[index : index + _BETWEEN], signs.values())
        self.is_windows |= b"\\site-packages\\" in chunk
        is_known = self.torch != failures.ANY_TORCH or b"orch" not in chunk
        if not is_known and (found := _TORCH.search(chunk)):
            version = int(found[1]), int(found[2])
            self.torch = version, version
        line, position = number, 0
        for match in _MEMORY.finditer(chunk):
            line += chunk.count(b"\n", position, match.start())
            position = match.start()
            levels = self._columns.setdefault(match[1] or b"GPU_mem", [])
            size = float(match[2] or match[3])
            if levels and size < levels[-1][1]:
                levels.clear()
            if not levels or size > levels[-1][1]:
                levels.append((line, size))

    def _see(self, number: int, lines: Sequence[bytes], signs: Iterable[Sign]) -> None:
        """What the first of `lines` says. One that is sure takes the place of those that may be."""
        line = clean(lines[0])
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
            if sign.kind == OUT_OF_MEMORY and self.failed is None:
                self.failed, self.rank = _message(map(clean, lines), rank), rank
                if self.failed is not None:
                    found.apart = ""  # no other words have these figures

    def _judge(self) -> None:
        """What only the whole log shows: its torch, what that has to offer, a memory that grew."""
        failed = self.failed
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
        failed_at = out.evidence[0][0]
        grown = [one for one in self._columns.items() if _grow(one[1], failed_at)]
        for name, levels in sorted(grown, key=lambda one: len(one[1]))[-1:]:
            sign = failures.BY_KIND[failures.GROWTH]
            shown = [(line, f"{name.decode()} {size:g}") for line, size in (levels[0], levels[-1])]
            self.findings[sign.kind] = Finding(
                sign.kind, sign.means, shown, len(levels), todo=sign.told(), apart=sign.apart
            )


def _message(lines: Iterable[str], rank: int | None) -> FailedRequest | None:
    """The message of a rank that begins `lines`, between which those of other ranks may lie. They
    were broken between words or within them: the reading that tells more is right."""
    own = (_RANK.sub("", line) for line in lines if rank_of(line) in (rank, None))
    message = list(islice(own, _FOLLOWING))
    readings = (read_message(joint.join(message)) for joint in (" ", ""))
    return max(filter(None, readings), key=lambda reading: len(reading.known), default=None)


def _grow(levels: Sequence[Level], until: int) -> bool:
    """Whether a column rose in the second half of the lines as it did in the first. The highest so
    far of sizes drawn at random rises ever more rarely: in the second half of n by ln 2 times on
    average."""
    later = [n for n, level in enumerate(levels) if 2 * level[0] >= levels[0][0] + until]
    if len(later) < _FEWEST:
        return False
    (_, before), (_, first), (_, last) = levels[later[0] - 1], levels[0], levels[-1]
    return 3 * (last - before) >= last - first


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
        data += file.readline(_CHUNK_BYTES)
        yield _ANSI.sub(b"", data) if b"\x1b" in data else data  # colours, also within a word
