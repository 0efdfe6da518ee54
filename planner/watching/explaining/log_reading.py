"""A log of any size, line by line: only what may matter is looked at, and little is kept.

A request for memory that failed is read from torch's own message in the wordings of all its
versions (`failures.json` has them with their sources), or made of a snapshot's figures.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise, takewhile
from typing import IO, Any

from pydantic import TypeAdapter

from planner.core import failures
from planner.core.failures import BY_KIND, OUT_OF_MEMORY, SAID, Sign, Versions, told
from planner.core.schema.record import noteworthy_bytes
from planner.core.units import MAX_MEMORY_BYTES

MAX_EVIDENCE = 3  # lines shown of one finding
MAX_SHOWN = 300  # characters of one
MANY = 100_000  # lines of a kind that are counted; it is not looked for in later ones
_CHUNK_BYTES = 1 << 20
_FOLLOWING = 8  # lines that a message may go on over
_BETWEEN = 100  # lines that it lies in, with those of other ranks
_MAX_LINE = 20_000  # characters that are searched
_ANSI = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)")
_SPACES = re.compile(r"\s+")
_RANK = re.compile(SAID["log"]["rank"])
_TORCH = re.compile(SAID["log"]["torch"].encode())
_MEMORY = re.compile(SAID["log"]["memory"].encode(), re.MULTILINE)
_WORDED = SAID["allocator_message"]
_FIGURES = {  # sizes are bounded: a line of digits is read in time in proportion to it
    key: re.compile("|".join(patterns).replace("{size}", _WORDED["size"]))
    for key, patterns in _WORDED["figures"].items()
}
_WORDINGS = TypeAdapter(dict[str, Versions]).validate_python(_WORDED["wordings"])
# WSL's driver says 2^64 bytes of a process that it does not know (17179869184.00 GiB).
_MAX_TIMES_DEVICE = 16


@dataclass(frozen=True)
class FailedRequest:
    """What is known of one, in bytes by name: `requested_bytes`, and where it is told `total_bytes`
    and `free_bytes` of the `device`, `allocated_bytes` to tensors, `unused_bytes` that the
    allocator holds and no tensor uses, `private_pool_bytes`, `process_bytes` (all that this process
    holds, its context too), `other_bytes` (other processes) and `allowed_bytes` (a limit on the
    process). `torch` are the versions that word it so; `is_cuda` is false of ROCm's, XPU's, NPU's.
    """

    known: Mapping[str, int]
    torch: Versions = failures.ANY_TORCH
    is_cuda: bool = True

    @property
    def held_bytes(self) -> int:
        return self.known.get("allocated_bytes", 0) + self.known.get("unused_bytes", 0)

    @property
    def figures(self) -> dict[str, int]:
        """And what follows from them, where it is not nonsense (on Windows torch may hold more than
        the device has, in the host's memory): what must be freed at least for the request, what
        could be free if this torch freed all, what is held outside of it, what of that this process
        holds beside it (the context, libraries), and the rest, which others do."""
        known, held = self.known, self.held_bytes
        allowed = max(known.get("allowed_bytes", MAX_MEMORY_BYTES) - held, 0)
        room = min(known.get("free_bytes", 0), allowed)
        found = {"missing_bytes": known["requested_bytes"] - room}
        if known.keys() >= {"allocated_bytes", "process_bytes"}:
            found["beside_bytes"] = known["process_bytes"] - held
        if known.keys() >= {"total_bytes", "free_bytes", "allocated_bytes"}:
            found["could_be_free_bytes"] = known["free_bytes"] + held
            found["outside_bytes"] = known["total_bytes"] - found["could_be_free_bytes"]
            if "other_bytes" not in known and "beside_bytes" in found:
                found["rest_bytes"] = found["outside_bytes"] - found["beside_bytes"]
        return {**known, **{key: value for key, value in found.items() if value > 0}}

    def ways_out(
        self, torch: Versions = failures.ANY_TORCH, is_windows: bool = False
    ) -> tuple[str, ...]:
        """What the figures say and advise, most certain first, to whoever has one of these."""
        figures = self.figures
        total = figures.get("total_bytes")
        bounds = {
            "limit_bytes": figures.get("allowed_bytes", total), "held_bytes": self.held_bytes,
            "is_windows": is_windows,  # where expandable segments are not
            "joinable_bytes": figures.get("unused_bytes") if self.is_cuda else None,
            "noteworthy_bytes": noteworthy_bytes(total or figures.get("reserved_bytes", 0)),
        }  # fmt: skip
        return told(failures.TOLD["ways_out"], torch, figures | bounds)


def read_message(text: str) -> FailedRequest | None:
    """The figures of the first message in `text`; None where there is none."""
    sizes = {key: list(map(_size, pattern.finditer(text))) for key, pattern in _FIGURES.items()}
    listed = sizes.pop("listed_bytes")
    found = {key: first[0] for key, first in sizes.items() if first}
    if "requested_bytes" not in found:
        return None
    if (reserved := found.pop("reserved_bytes", None)) is not None:
        found["unused_bytes"] = max(reserved - found.get("allocated_bytes", 0), 0)
    if found.get("process_bytes", 0) > _MAX_TIMES_DEVICE * found.get("total_bytes", 0):
        del found["process_bytes"]
    # torch lists processes by number; where none is called "this", the one that holds at least what
    # torch does is (in a container its number is another).
    if listed:
        held = FailedRequest(found).held_bytes
        own = [] if "process_bytes" in found else [size for size in listed if size >= held]
        if own:
            found["process_bytes"] = min(own)
        if "process_bytes" in found:
            found["other_bytes"] = sum(listed) - min(own, default=0)
    worded = (torch for pattern, torch in _WORDINGS.items() if re.search(pattern, text))
    return FailedRequest(found, next(worded, failures.ANY_TORCH), "CUDA out of memory" in text)


def _size(match: re.Match[str]) -> int:
    """A size, or a number without a unit."""
    number, *unit = filter(None, match.groups())
    return int(float(number) * _WORDED["scale"]["".join(unit) or "B"])


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


class LogReading:
    """What was found: a finding of each kind, in the order of their first lines, and torch's first
    message that has figures, with its rank (the later ones follow from it)."""

    def __init__(self) -> None:
        self.findings: dict[str, Finding] = {}
        self.failed: FailedRequest | None = None
        self.rank: int | None = None
        self.torch: Versions = failures.ANY_TORCH
        self.is_windows = False
        self._columns: dict[bytes, list[tuple[int, float]]] = {}  # the lines where each rose

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
        if (
            self.torch == failures.ANY_TORCH
            and b"orch" in chunk
            and (found := _TORCH.search(chunk))
        ):
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
        for sign in signs:
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
        failed, out = self.failed, self.findings.get(OUT_OF_MEMORY)
        if failed is not None and not failed.torch[0] <= self.torch[0] <= failed.torch[1]:
            self.torch = failed.torch
        grew = BY_KIND[failures.GROWTH]
        for name, levels in self._columns.items():
            if out is not None and not out.apart and _grow(levels, out.evidence[0][0]):
                shown = [(n, f"{name.decode()} {size:g}") for n, size in (levels[0], levels[-1])]
                found = Finding(grew.kind, grew.means, shown, len(levels), apart=grew.apart)
                self.findings[grew.kind] = found
        for found in self.findings.values():
            found.todo = BY_KIND[found.kind].told(self.torch)
        if failed is not None and out is not None:
            out.figures, out.todo = failed.figures, failed.ways_out(self.torch, self.is_windows)


def _message(lines: Iterable[str], rank: int | None) -> FailedRequest | None:
    """The message of a rank that begins `lines`, between which those of other ranks may lie. They
    were broken between words or within them: the reading that tells more is right."""
    own = (_RANK.sub("", line) for line in lines if rank_of(line) in (rank, None))
    is_new = BY_KIND[OUT_OF_MEMORY].is_sure
    message = [next(own), *islice(takewhile(lambda line: is_new(line) is None, own), _FOLLOWING)]
    readings = (read_message(joint.join(message)) for joint in (" ", ""))
    return max(filter(None, readings), key=lambda reading: len(reading.known), default=None)


def _grow(levels: Sequence[tuple[int, float]], until: int) -> bool:
    """Whether a column rose in the second half of the lines as it did in the first. The highest so
    far of sizes drawn at random rises ever more rarely: in the second half of n by ln 2 times on
    average."""
    early = [size for line, size in levels if 2 * line <= levels[0][0] + until]
    if not early or len(levels) - len(early) < 3:
        return False
    first, last = levels[0][1], levels[-1][1]
    return 3 * (last - early[-1]) >= last - first


def rank_of(line: str) -> int | None:
    """The rank that a launcher or torch put before a line, or that the line speaks of."""
    found = _RANK.search(line)
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
