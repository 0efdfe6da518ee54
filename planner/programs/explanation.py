"""`planner.explain`: from a log or a snapshot to what happened and what to do.

First the request for memory that failed, from torch's own message in the wordings of all its
versions (`failures.json` has them with their sources) or from a snapshot's figures; then the log,
which may have any size and is read in chunks; then the explanation, against a plan if there is one.
"""

from __future__ import annotations

import codecs
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice, pairwise, takewhile
from os import PathLike
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, cast

from pydantic import TypeAdapter

from planner.core import failures
from planner.core.errors import PlannerError, UsageError, refuse_if
from planner.core.files import STANDARD_INPUT, named_path, opened_whole
from planner.core.schema import TrainSetting
from planner.core.schema.record import noteworthy_bytes
from planner.core.units import MAX_MEMORY_BYTES, MIB
from planner.programs.snapshots import NO_STACK, SnapshotReading, read_pickle, read_snapshot

if TYPE_CHECKING:
    from planner.advice.advice import Advice
    from planner.estimation.arguments import ResultLike
    from planner.estimation.estimate import Estimate
    from planner.machine.hardware.gpu import Gpu


MAX_EVIDENCE = 3  # lines shown of one finding
MAX_SHOWN = 300  # characters of one
MANY = 100_000  # lines of a kind that are counted; it is not looked for in later ones
_CHUNK_BYTES = 1 << 20
_FOLLOWING = 8  # lines that a message may go on over
_BETWEEN = 100  # lines that it lies in, with those of other ranks
_MAX_LINE = 20_000  # characters that are searched
_ANSI = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)")
_SPACES = re.compile(r"\s+")
_RANK = re.compile(failures.TEXTS["log"]["rank"])
_TORCH = re.compile(failures.TEXTS["log"]["torch"].encode())
_MEMORY = re.compile(failures.TEXTS["log"]["memory"].encode(), re.MULTILINE)
_WORDED = failures.TEXTS["allocator_message"]
_FIGURES = {  # sizes are bounded: a line of digits is read in time in proportion to it
    key: re.compile("|".join(patterns).replace("{size}", _WORDED["size"]))
    for key, patterns in _WORDED["figures"].items()
}
_WORDINGS = TypeAdapter(dict[str, failures.Versions]).validate_python(_WORDED["wordings"])
# WSL's driver says 2^64 bytes of a process that it does not know (17179869184.00 GiB).
_MAX_TIMES_DEVICE = 16


@dataclass(frozen=True)
class FailedRequest:
    """A request for memory that failed. `known` are its figures by name, in bytes.

    `requested_bytes` is always known. The others are there where the source tells them:
    `total_bytes` and `free_bytes` of the `device`; `allocated_bytes` to tensors; `unused_bytes`
    that the allocator holds and no tensor uses; `private_pool_bytes`; `process_bytes` (all that
    this process holds, its CUDA context too); `other_bytes` (other processes); `allowed_bytes` (a
    limit on the process). `torch` are the first and last version that word the message so;
    `is_cuda` is false for ROCm, XPU and NPU.
    """

    known: Mapping[str, int]
    torch: failures.Versions = failures.ANY_TORCH
    is_cuda: bool = True

    @property
    def held_bytes(self) -> int:
        return self.known.get("allocated_bytes", 0) + self.known.get("unused_bytes", 0)

    @property
    def figures(self) -> dict[str, int]:
        """The known figures and what follows from them.

        `missing_bytes` must be freed at least for the request; `could_be_free_bytes` would be free
        if this torch freed all it holds; `outside_bytes` are held outside of it, of which this
        process holds `beside_bytes` (the context, libraries) and others `rest_bytes`. A figure that
        is not above 0 is left out: on Windows torch may hold more than the device has, in the
        host's memory."""
        known, held = self.known, self.held_bytes
        allowed = max(known.get("allowed_bytes", MAX_MEMORY_BYTES) - held, 0)
        room = min(known.get("free_bytes", 0), allowed)
        derived = {"missing_bytes": known["requested_bytes"] - room}
        if known.keys() >= {"allocated_bytes", "process_bytes"}:
            derived["beside_bytes"] = known["process_bytes"] - held
        if known.keys() >= {"total_bytes", "free_bytes", "allocated_bytes"}:
            derived["could_be_free_bytes"] = known["free_bytes"] + held
            derived["outside_bytes"] = known["total_bytes"] - derived["could_be_free_bytes"]
            if "other_bytes" not in known and "beside_bytes" in derived:
                derived["rest_bytes"] = derived["outside_bytes"] - derived["beside_bytes"]
        return {**known, **{key: value for key, value in derived.items() if value > 0}}

    def ways_out(
        self, torch: failures.Versions = failures.ANY_TORCH, is_windows: bool = False
    ) -> tuple[str, ...]:
        """What to do by these figures, most certain first, with a torch between these versions."""
        figures = self.figures
        total = figures.get("total_bytes")
        bounds = {
            "limit_bytes": figures.get("allowed_bytes", total), "held_bytes": self.held_bytes,
            "is_windows": is_windows,  # where expandable segments are not
            "joinable_bytes": figures.get("unused_bytes") if self.is_cuda else None,
            "noteworthy_bytes": noteworthy_bytes(total or figures.get("reserved_bytes", 0)),
        }  # fmt: skip
        return failures.ways_out(failures.REMEDIES["by_figures"], torch, figures | bounds)


def read_message(text: str) -> FailedRequest | None:
    """The figures of the first message in `text`; None where there is none."""
    sizes = {key: list(map(_size, pattern.finditer(text))) for key, pattern in _FIGURES.items()}
    listed = sizes.pop("listed_bytes")
    known = {key: first[0] for key, first in sizes.items() if first}
    if "requested_bytes" not in known:
        return None
    if (reserved := known.pop("reserved_bytes", None)) is not None:
        known["unused_bytes"] = max(reserved - known.get("allocated_bytes", 0), 0)
    if known.get("process_bytes", 0) > _MAX_TIMES_DEVICE * known.get("total_bytes", 0):
        del known["process_bytes"]
    # torch lists processes by number. Where none is called "this", it is one that holds at least
    # what torch holds (in a container its number is another).
    if listed:
        held = FailedRequest(known).held_bytes
        own = [] if "process_bytes" in known else [size for size in listed if size >= held]
        if own:
            known["process_bytes"] = min(own)
        if "process_bytes" in known:
            known["other_bytes"] = sum(listed) - min(own, default=0)
    versions = (torch for pattern, torch in _WORDINGS.items() if re.search(pattern, text))
    return FailedRequest(known, next(versions, failures.ANY_TORCH), "CUDA out of memory" in text)


def _size(match: re.Match[str]) -> int:
    """A size, or a number without a unit."""
    number, *unit = filter(None, match.groups())
    return int(float(number) * _WORDED["scale"]["".join(unit) or "B"])


@dataclass
class Diagnosis:
    """Something that was recognised: its `kind`, its `meaning` in a sentence, and the ways out.

    `evidence` are the first lines that say so (number from 1, and text), `count` how many there
    are, `ranks` the ranks that said so, `figures` what was read from them. `to_tell` is empty where
    the lines cannot mean anything else; otherwise the diagnosis is only possible, and it says what
    would tell."""

    kind: str
    meaning: str
    evidence: list[tuple[int, str]] = field(default_factory=list)
    count: int = 0
    ranks: tuple[int, ...] = ()
    figures: dict[str, Any] = field(default_factory=dict)
    ways_out: tuple[str, ...] = ()
    to_tell: str = ""

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
        return {**vars(self), "certain": not self.to_tell, "evidence": evidence}


class LogReading:
    """Reads a log: a finding of each kind, in the order of their first lines, and torch's first
    message that has figures, with its rank (later messages follow from it)."""

    def __init__(self) -> None:
        self.findings: dict[str, Diagnosis] = {}
        self.failed: FailedRequest | None = None
        self.rank: int | None = None
        self.torch: failures.Versions = failures.ANY_TORCH
        self.is_windows = False
        self._columns: dict[bytes, list[tuple[int, float]]] = {}  # lines where it rose, and to what

    def read(self, file: IO[bytes]) -> LogReading:
        number = 1
        for chunk, ahead in pairwise(chain(_chunks(file), [b""])):
            self._read_chunk(number, chunk, ahead)
            number += chunk.count(b"\n")
        self._judge()
        return self

    def _read_chunk(self, number: int, chunk: bytes, ahead: bytes) -> None:
        """A chunk has few of the signs' words, and most of its lines none: plain words are found
        faster than patterns. A kind that was counted MANY times is not looked for any more."""
        counted = {kind for kind, finding in self.findings.items() if finding.count >= MANY}
        looked_for = (sign for sign in failures.SIGNS if sign.kind not in counted)
        in_chunk = [(word, sign) for sign in looked_for for word in sign.words if word in chunk]
        if in_chunk:
            lines = chunk.removesuffix(b"\n").split(b"\n")
            followed = lines + ahead.split(b"\n", _BETWEEN)[:_BETWEEN]
            for index, raw in enumerate(lines):
                signs = {sign.kind: sign for word, sign in in_chunk if word in raw}
                if signs:
                    self._see(number + index, followed[index : index + _BETWEEN], signs.values())
        self.is_windows |= b"\\site-packages\\" in chunk
        is_unknown = self.torch == failures.ANY_TORCH and b"orch" in chunk
        if is_unknown and (release := _TORCH.search(chunk)):
            version = int(release[1]), int(release[2])
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

    def _see(self, number: int, lines: Sequence[bytes], signs: Iterable[failures.Sign]) -> None:
        """Notes the signs that the first of `lines` shows. A sure one replaces a possible one."""
        line = clean(lines[0])
        rank = rank_of(line)
        for sign in signs:
            is_sure = sign.is_sure(line)
            if is_sure is None:
                continue
            finding = self.findings.get(sign.kind)
            if finding is None or (is_sure and finding.to_tell):
                finding = Diagnosis(sign.kind, sign.meaning)
                self.findings[sign.kind] = finding
                finding.to_tell = "" if is_sure else sign.to_tell
            if is_sure or finding.to_tell:
                finding.see(number, line, rank)
            if sign.kind == failures.OUT_OF_MEMORY and self.failed is None:
                self.failed, self.rank = _read_lines(map(clean, lines), rank), rank
                if self.failed is not None:
                    finding.to_tell = ""  # no other words have these figures

    def _judge(self) -> None:
        """Notes what only the whole log shows: its torch, what to do with that torch, and a memory
        that grew."""
        failed, out = self.failed, self.findings.get(failures.OUT_OF_MEMORY)
        if failed is not None and not failed.torch[0] <= self.torch[0] <= failed.torch[1]:
            self.torch = failed.torch
        grew = failures.BY_KIND[failures.GROWTH]
        for name, levels in self._columns.items():
            if out is not None and not out.to_tell and _has_grown(levels, out.evidence[0][0]):
                shown = [(n, f"{name.decode()} {size:g}") for n, size in (levels[0], levels[-1])]
                self.findings[grew.kind] = Diagnosis(
                    grew.kind, grew.meaning, shown, len(levels), to_tell=grew.to_tell
                )
        for finding in self.findings.values():
            finding.ways_out = failures.BY_KIND[finding.kind].ways_out(self.torch)
        if failed is not None and out is not None:
            out.figures, out.ways_out = failed.figures, failed.ways_out(self.torch, self.is_windows)


def _read_lines(lines: Iterable[str], rank: int | None) -> FailedRequest | None:
    """The message of a rank that begins at the first of `lines`; lines of other ranks may lie
    between. A terminal broke it between words or within them: the reading that tells more is right.
    """
    own = (_RANK.sub("", line) for line in lines if rank_of(line) in (rank, None))
    is_new = failures.BY_KIND[failures.OUT_OF_MEMORY].is_sure
    message = [next(own), *islice(takewhile(lambda line: is_new(line) is None, own), _FOLLOWING)]
    readings = (read_message(joint.join(message)) for joint in (" ", ""))
    return max(filter(None, readings), key=lambda reading: len(reading.known), default=None)


def _has_grown(levels: Sequence[tuple[int, float]], until: int) -> bool:
    """Whether a column rose in the second half of the lines as in the first. The highest of sizes
    drawn at random rises ever more rarely: in the second half of n by ln 2 times on average."""
    early = [size for line, size in levels if 2 * line <= levels[0][0] + until]
    if not early or len(levels) - len(early) < 3:
        return False
    first, last = levels[0][1], levels[-1][1]
    return 3 * (last - early[-1]) >= last - first


def rank_of(line: str) -> int | None:
    """The rank that a launcher or torch put before a line, or that the line speaks of."""
    match = _RANK.search(line)
    return next((int(text) for text in match.groups() if text), None) if match else None


def clean(raw: bytes) -> str:
    """A line as text, without progress bars' returns and doubled spaces. Spaces at its ends stay,
    since a terminal breaks a line where it is full."""
    return _SPACES.sub(" ", raw[: 4 * _MAX_LINE].decode("utf-8", errors="replace")[:_MAX_LINE])


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    """Pieces that end with a line; a longer line is cut."""
    while data := file.read(_CHUNK_BYTES):
        data += file.readline(_CHUNK_BYTES)
        yield _ANSI.sub(b"", data) if b"\x1b" in data else data  # colours, also within a word


# The explanation.

LARGE_CHANGES = "batch_size", "accumulate", "checkpointing", "compile", "offload"
MAX_CARD_ERROR = 0.1  # of the memory: what a driver keeps for itself differs by less
_PICKLE = b"\x80"
_UTF16 = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE
_WHAT = "Name what the training printed, or a snapshot of torch's allocator."


@dataclass(frozen=True)
class Relief:
    """At least `needed_bytes` must become free. `advice` has the ways of training the same model
    that free them; `why_none` says why there are none."""

    needed_bytes: int
    advice: Advice | None = None
    why_none: str = ""


@dataclass
class Explanation:
    """What happened, by `source`. `seen` are the figures at the failure, by name; `expected` is
    what the plan's setting needs. `differs` says how the two differ, `relief` which ways free
    enough memory."""

    source: str
    kind: Literal["log", "snapshot"]
    findings: list[Diagnosis] = field(default_factory=list)
    seen: dict[str, Any] = field(default_factory=dict)
    snapshot: SnapshotReading | None = None
    expected: Estimate | None = None
    differs: tuple[str, ...] = ()
    relief: Relief | None = None
    notes: list[str] = field(default_factory=list)


def explain(
    source: str | PathLike[str],
    plan: ResultLike | None = None,
    *,
    gpu: str | Gpu | None = None,
    allocator: str | None = None,
) -> Explanation:
    """Why a training failed, and what to do.

    `source` is a log or a snapshot of torch's allocator, also gzipped, also a pipe; "-" is standard
    input. `plan` is what you meant to train: an Estimate, an Advice, a Recommendation, or the file
    or folder of one. The answer then compares what happened with what was predicted, on `gpu` and
    with `allocator` where the plan does not name them, and names the ways that free enough memory.
    Raises UsageError for what cannot be read.
    """
    from planner.estimation.arguments import read_gpu

    card, explanation = read_gpu(gpu), _read(named_path(source, "source"))
    if plan is not None:
        _compare(explanation, _estimate_plan(plan, card, allocator))
    elif explanation.seen:
        explanation.notes.append(failures.sentence("add a plan"))
    return explanation


# What each source says.


def _read(path: Path) -> Explanation:
    name = "standard input" if str(path) == STANDARD_INPUT else str(path)
    law = f"{name} is no log: planner.watch says what it sees in the training's own."
    refuse_if(path.is_dir() or path.name == "watch.jsonl", law, _WHAT)
    try:
        with opened_whole(path) as file:
            head = file.read(4096)
            file.seek(0)
            if head.startswith(_PICKLE):
                return _explain_snapshot(name, read_snapshot(read_pickle(file, name), name))
            if head.startswith(_UTF16):
                file = cast("IO[bytes]", codecs.EncodedFile(file, "utf-8", "utf-16", "replace"))
            elif b"\x00" in head:
                raise ValueError("it is neither text nor a snapshot of torch's allocator")
            return _explain_log(name, LogReading().read(file))
    except (OSError, EOFError, ValueError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{name} cannot be read: {reason}.", _WHAT) from None


def _explain_log(name: str, reading: LogReading) -> Explanation:
    explanation = Explanation(name, "log", list(reading.findings.values()))
    explanation.findings.sort(key=lambda finding: finding.evidence[0][0])
    if reading.failed is not None:
        explanation.seen = reading.failed.figures
        ranks = reading.findings[failures.OUT_OF_MEMORY].ranks
        if len(ranks) > 1:
            words = "" if reading.rank is None else f", rank {reading.rank}"
            explanation.notes.append(failures.sentence("ranks", ranks=len(ranks), rank=words))
    return explanation


def _explain_snapshot(name: str, reading: SnapshotReading) -> Explanation:
    explanation = Explanation(name, "snapshot", seen=reading.figures, snapshot=reading)
    if "requested_bytes" in reading.figures:
        failed = FailedRequest(reading.figures)
        explanation.seen = seen = failed.figures
        meaning, ways_out = failures.sentence("snapshot failed", seen), failed.ways_out()
        out = Diagnosis(failures.OUT_OF_MEMORY, meaning, [], 1, figures=seen, ways_out=ways_out)
        explanation.findings = [out]
    if reading.categories.keys() == {NO_STACK}:
        explanation.notes.append(failures.sentence("no stacks"))
    return explanation


# The comparison with a plan.


def _estimate_plan(plan: ResultLike, card: Gpu | None, allocator: str | None) -> Estimate:
    from planner.estimation.estimate import Estimate, estimate
    from planner.estimation.predicted import Predicted, is_predicted, read_predicted
    from planner.machine.hardware.gpu import recognise_gpu
    from planner.trainers.emission import as_result, nothing_fitted, read_found

    if isinstance(plan, Estimate):
        return plan
    data, source = read_found(plan, "plan")
    found = read_predicted(data, source) if is_predicted(data) else as_result(data, source)
    if found.setting is None:
        raise nothing_fitted(source)
    if isinstance(found, Predicted):
        card, allocator = card or found.gpu, allocator or found.allocator
    else:
        card = card or recognise_gpu(found.device.name, found.device.total_bytes)
    return estimate(found.model, found.setting, gpu=card, allocator=allocator)


def _compare(explanation: Explanation, predicted: Estimate) -> None:
    seen, peak = explanation.seen, predicted.peak_allocated_bytes
    overhead = predicted.peak_reserved_bytes - peak
    sizes = {"peak_bytes": peak, "overhead_bytes": overhead}
    sizes["tolerated_bytes"] = 2 * overhead + 64 * MIB
    if allocated := seen.get("allocated_bytes"):
        needed = allocated + seen.get("requested_bytes", 0)
        sizes |= {"wanted_bytes": needed, "more_bytes": needed - peak}
    total, budget = seen.get("total_bytes"), predicted.budget_bytes
    apart = abs(total - budget) if total and budget else 0
    is_other = budget is not None and apart > MAX_CARD_ERROR * budget
    if is_other:
        sizes |= {"budget_bytes": budget or 0, "apart_bytes": apart}
    explanation.expected = predicted
    explanation.differs = failures.ways_out(
        failures.REMEDIES["against_plan"], failures.ANY_TORCH, seen | sizes
    )
    missing = seen.get("missing_bytes") or seen.get("requested_bytes")
    if missing is not None and is_other:
        explanation.relief = Relief(int(missing), why_none=failures.sentence("other card"))
    elif missing is not None:
        total = seen.get("total_bytes") or predicted.budget_bytes
        room = total - seen.get("other_bytes", 0) if total else None
        explanation.relief = find_relief(predicted, int(missing), room)


def find_relief(predicted: Estimate, missing_bytes: int, room_bytes: int | None) -> Relief:
    """Ways to train the same model that need at least `missing_bytes` less than `predicted`, and at
    most `room_bytes` (the card, less what others hold)."""
    from planner.advice.advice import advise

    total = predicted.device_total_bytes
    target = min(total - missing_bytes, total if room_bytes is None else room_bytes)
    needed = total - target
    target -= target % MIB  # so that the ways' commands are short
    if target <= 0:
        return Relief(needed, why_none="that is more than the whole step needs")
    setting = TrainSetting.model_validate(predicted.setting.model_dump())
    try:
        advised = partial(advise, predicted.model, setting, gpu=predicted.gpu,
                          memory_bytes=target, allocator=predicted.allocator)  # fmt: skip
        advice, least = advised(), advised(keep=LARGE_CHANGES).recommended
    except PlannerError as error:
        return Relief(needed, why_none=error.message)
    if least is not None:  # first the way that changes least, then by speed
        others = (way for way in advice.ways if way.setting != least.setting)
        advice = replace(advice, ways=(least, *others))
    return Relief(needed, advice, "" if advice.ways else failures.sentence("no lever"))
