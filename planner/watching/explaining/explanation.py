"""`planner.explain`: from a log, a `watch.jsonl` or a snapshot to what happened and what to do."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import math
import os
import stat
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from threading import Thread
from typing import IO, TYPE_CHECKING, Any, Literal, cast

from planner.core.errors import PlannerError, UsageError
from planner.core.failures import OUT_OF_MEMORY, WATCH_EVENTS
from planner.core.files import named_path
from planner.core.units import MAX_MEMORY_BYTES, MAX_SECONDS, MIB, format_bytes
from planner.watching.explaining.allocator_message import read_message
from planner.watching.explaining.log_reading import MAX_SHOWN, Finding, LogReading
from planner.watching.explaining.snapshot_reading import SnapshotReading, read_snapshot
from planner.watching.watch import MAX_LOG_BYTES

if TYPE_CHECKING:
    from planner.estimation.arguments import ModelLike, SettingLike
    from planner.estimation.estimate import Estimate
    from planner.machine.hardware.gpu import Gpu
    from planner.watching.explaining.relief import Relief

STANDARD_INPUT = "-"
_HEAD_BYTES = 65_536  # the first line of a watch.jsonl has the plan in it
_PICKLE, _GZIP = b"\x80", b"\x1f\x8b"
_UTF16 = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_WAIT_SECONDS = 5.0  # for somebody who writes into a named pipe
_MAX_KINDS = 64  # of a watch's events


@dataclass
class Explanation:
    """What was found in `source`. `seen` are the bytes at the failure, by name, `expected` what the
    plan's setting needs at its peak; `differs` says how they differ, `relief` which levers free
    enough. `run` is of a `watch.jsonl`, `snapshot` of a snapshot."""

    source: str
    kind: Literal["log", "watch", "snapshot"]
    findings: list[Finding] = field(default_factory=list)
    seen: dict[str, Any] = field(default_factory=dict)
    snapshot: SnapshotReading | None = None
    run: dict[str, Any] = field(default_factory=dict)
    expected: Estimate | None = None
    differs: list[str] = field(default_factory=list)
    relief: Relief | None = None
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        parts = {
            "snapshot": self.snapshot, "expected": self.expected, "relief": self.relief,
        }  # fmt: skip
        return {
            "source": self.source,
            "kind": self.kind,
            "findings": [finding.to_json() for finding in self.findings],
            "seen": self.seen,
            "run": self.run or None,
            "differs": self.differs,
            "notes": self.notes,
            **{name: part.to_json() if part else None for name, part in parts.items()},
        }


def explain(
    source: str | PathLike[str],
    model: ModelLike | None = None,
    setting: SettingLike | None = None,
    *,
    plan: object = None,
    gpu: str | Gpu | None = None,
    allocator: str | None = None,
    **overrides: Any,
) -> Explanation:
    """What `source` (a log, a `watch.jsonl`, a snapshot of torch's allocator; also gzipped, also a
    pipe; "-" is standard input) says of a training that failed, and what to do.

    `plan` is what was to be trained: a Recommendation, its file or its folder; or else `model` and
    `setting` with `overrides`, as `planner.estimate` takes them. With either, what was seen is held
    against what was predicted, and the levers that free enough are named. Raises UsageError for
    what cannot be read.
    """
    found = _read(named_path(source, "source"))
    meant = _meant(model, setting, plan, gpu, overrides)
    if meant is not None:
        _compare(found, *meant, allocator)
    elif found.kind != "watch" and found.seen:
        found.notes.append(
            "Add --plan RUN, or MODEL and its options, to see which changes free enough memory."
        )
    return found


# ---------------------------------------------------------------- what each source says


def is_pipe(path: Path) -> bool:
    """Whether it is read until whoever writes it ends: standard input, or a named pipe."""
    return str(path) == STANDARD_INPUT or (path.exists() and stat.S_ISFIFO(path.stat().st_mode))


class _Whole(io.RawIOBase):
    """A stream of which `head` was read already, from its beginning again: a pipe is read once."""

    def __init__(self, head: bytes, rest: IO[bytes]) -> None:
        self._head, self._rest = head, rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        data = self._head[: len(buffer)] or self._rest.read(len(buffer))
        self._head = self._head[len(data) :]
        buffer[: len(data)] = data
        return len(data)


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    if str(path) == STANDARD_INPUT:
        if sys.stdin is None:
            raise UsageError("standard input is closed.", "Name a file, or pipe a log into it.")
        yield sys.stdin.buffer
    else:
        with os.fdopen(_writer_awaited(path), "rb") if is_pipe(path) else path.open("rb") as file:
            yield file


def _writer_awaited(path: Path) -> int:
    """A descriptor of a named pipe. To open one waits for a writer, without end."""
    opened: list[int] = []
    waiting = Thread(target=lambda: opened.append(os.open(path, os.O_RDONLY)), daemon=True)
    waiting.start()
    waiting.join(_WAIT_SECONDS)
    if not opened:
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))  # lets the thread go
        raise UsageError(
            f"{path} is a pipe, and nobody has opened it to write for {_WAIT_SECONDS:.0f} s.",
            "Start the writer first, or pipe it: cat train.log | planner explain -",
        )
    return opened[0]


def _from_the_beginning(file: IO[bytes]) -> tuple[bytes, IO[bytes]]:
    """Its first bytes, and all of it; both unpacked where it is gzipped."""
    head = file.read(_HEAD_BYTES)
    whole = cast("IO[bytes]", io.BufferedReader(_Whole(head, file)))
    if head.startswith(_GZIP):
        return _from_the_beginning(cast("IO[bytes]", gzip.GzipFile(fileobj=whole)))
    return head, whole


def _read(path: Path) -> Explanation:
    from planner.memory.snapshot import read_pickle

    if path.is_dir():
        if not (path / "watch.jsonl").is_file():
            raise UsageError(
                f"{path} is a folder without a watch.jsonl.",
                "Name a log, a snapshot or a watch.jsonl.",
            )
        path /= "watch.jsonl"
    name = "standard input" if str(path) == STANDARD_INPUT else str(path)
    try:
        with _opened(path) as raw:
            head, file = _from_the_beginning(raw)
            if head.startswith(_PICKLE):
                return _of_snapshot(name, read_snapshot(read_pickle(file, name)))
            encoding = next((name for bom, name in _UTF16.items() if head.startswith(bom)), "utf-8")
            if encoding == "utf-8" and b"\x00" in head[:4096]:
                raise UsageError(
                    f"{name} is neither text nor a snapshot of torch's allocator.",
                    "Write one with torch.cuda.memory._dump_snapshot(path).",
                )
            if _is_start(_line(head.partition(b"\n")[0])):
                return _of_watch(name, file)
            return _of_log(name, LogReading().read(file, encoding))
    except (OSError, EOFError, ValueError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{name} cannot be read: {reason}.") from None


def _of_log(name: str, reading: LogReading) -> Explanation:
    found = Explanation(name, "log", list(reading.findings.values()))
    found.findings.sort(key=lambda finding: finding.evidence[0][0])
    if reading.first is not None:
        rank, message = reading.first
        found.seen = message.to_json()
        if len(reading.messages) > 1:
            found.notes.append(
                f"{len(reading.messages)} ranks ran out of memory; the figures are of the first"
                + (f", rank {rank}." if rank is not None else ".")
            )
    return found


def _of_snapshot(name: str, reading: SnapshotReading) -> Explanation:
    found = Explanation(name, "snapshot", snapshot=reading)
    found.seen = {
        "device": reading.device,
        "allocated_bytes": reading.allocated_bytes,
        "unused_bytes": reading.free_bytes,
        "reserved_bytes": reading.reserved_bytes,
    }
    if reading.requested_bytes is not None:
        found.seen |= {
            "requested_bytes": reading.requested_bytes,
            "free_bytes": reading.device_free_bytes,
            "missing_bytes": reading.missing_bytes,
        }
        found.findings.append(
            Finding(
                OUT_OF_MEMORY,
                f"A request of {format_bytes(reading.requested_bytes)} failed: the largest free "
                f"block has {format_bytes(reading.largest_free_bytes)}, and the driver had "
                f"{format_bytes(reading.device_free_bytes or 0)}.",
                count=1,
                figures={key: found.seen[key] for key in ("requested_bytes", "missing_bytes")},
                todo=tuple(reading.ways_out()),
            )
        )
    if not reading.has_stacks and reading.allocated_bytes:
        found.notes.append(
            "The snapshot has no stacks, so that it says sizes and not places: record a history "
            "(planner.watch(…, history=100_000), or torch.cuda.memory._record_memory_history())."
        )
    return found


# ---------------------------------------------------------------- watch.jsonl


def _of_watch(name: str, file: IO[bytes]) -> Explanation:
    """Its last run: the figures (device, plan, end, last interval), and a finding of each kind of
    event. Lines that are torn are passed over."""
    run: dict[str, Any] = {}
    findings: dict[str, Finding] = {}
    for number, raw in enumerate(file.read(2 * MAX_LOG_BYTES).splitlines(), start=1):
        line = _line(raw)
        kind = line.get("kind")
        if kind == "start":
            run, findings = {"start": line}, {}
        elif kind in ("interval", "end"):
            run[str(kind)] = line
        elif kind == "event":
            event = str(line.get("event") or "an event")[:MAX_SHOWN]
            if event in findings or len(findings) < _MAX_KINDS:
                message = str(line.get("message", ""))[:MAX_SHOWN]
                todo = (WATCH_EVENTS[event],) if event in WATCH_EVENTS else ()
                one = findings.setdefault(event, Finding(event, message, todo=todo))
                one.see(number, message, run.get("start", {}).get("rank"))
                told = ("kind", "event", "message", "seconds")
                one.figures = one.figures or {k: v for k, v in line.items() if k not in told}
    found = Explanation(name, "watch", list(findings.values()), run=run)
    if OUT_OF_MEMORY in findings:
        found.seen = dict(findings[OUT_OF_MEMORY].figures)
        message_text = found.seen.get("text")
        if isinstance(message_text, str) and (said := read_message(message_text)):
            found.seen |= said.to_json()
        elif (requested := found.seen.get("requested_bytes")) is not None:
            found.seen["missing_bytes"] = max(requested - found.seen.get("free_bytes", 0), 1)
    if "end" not in run:
        found.notes.append(
            "The log has no last line: the process was killed, or it is still running."
        )
    return found


def _is_start(line: Mapping[str, Any]) -> bool:
    return line.get("kind") == "start" and "planner" in json.dumps(line)


def _line(raw: bytes) -> dict[str, Any]:
    """What is of the kind that a watch writes: anybody may have written the file."""

    def finite(text: str) -> float | None:
        return float(text) if math.isfinite(float(text)) else None

    try:
        line = json.loads(raw, parse_float=finite, parse_constant=finite)
        return _sound(line) if isinstance(line, dict) else {}
    except (ValueError, RecursionError):
        return {}


def _sound(line: dict[str, Any]) -> dict[str, Any]:
    checked = ((key, value) for key, value in line.items() if _is_sound(key, value))
    return {k: _sound(v) if isinstance(v, dict) else v for k, v in checked}


def _is_sound(key: str, value: Any) -> bool:
    if key.endswith("_bytes") or key in ("step", "rank"):
        return type(value) is int and 0 <= value <= MAX_MEMORY_BYTES
    if key.endswith(("seconds", "_per_second", "_share")):
        return type(value) in (int, float) and 0 <= value <= MAX_SECONDS
    return key not in ("plan", "steady") or isinstance(value, dict)


# ---------------------------------------------------------------- held against a plan


def _meant(
    model: Any, setting: Any, plan: Any, gpu: Any, overrides: Mapping[str, Any]
) -> tuple[Any, Any, Gpu | None] | None:
    """The model and the setting that were to be trained, and the card where it is known."""
    from planner.estimation.arguments import read_gpu
    from planner.machine.hardware.catalogue import find_gpu

    card = read_gpu(gpu)
    if plan is not None:
        if model is not None or overrides:
            raise UsageError(
                "a plan says the model and its setting already.", "Omit --plan, or the model."
            )
        from planner.trainers.emission import read_result

        result = read_result(named_path(plan, "plan")) if isinstance(plan, str | PathLike) else plan
        if result.setting is None:
            raise UsageError(f"{plan} recommends nothing: no setting fitted.")
        if card is None and result.device.kind == "cuda":
            try:
                card = find_gpu(result.device.name)
            except PlannerError:  # a card that the catalogue does not have
                card = None
        return result.model, result.setting, card
    if model is None:
        if overrides or setting is not None:
            raise UsageError("a setting needs a model.", "Name MODEL behind the log.")
        return None
    from planner.estimation.estimate import read_choice

    return (*read_choice(model, setting, card, overrides), card)


def _compare(
    found: Explanation, model: Any, setting: Any, gpu: Gpu | None, allocator: str | None
) -> None:
    from planner.estimation.estimate import estimate
    from planner.watching.explaining.relief import find_relief

    predicted = found.expected = estimate(model, setting, gpu=gpu, allocator=allocator)
    seen = found.seen
    found.differs += _differences(seen, predicted)
    missing = seen.get("missing_bytes") or seen.get("requested_bytes")
    if missing is not None:
        total = seen.get("total_bytes") or (gpu.memory_bytes if gpu else None)
        room = total - seen.get("other_bytes", 0) if total is not None else None
        found.relief = find_relief(predicted, int(missing), room, gpu, allocator)


def _differences(seen: Mapping[str, Any], predicted: Estimate) -> Iterator[str]:
    peak = predicted.peak_allocated_bytes
    if allocated := seen.get("allocated_bytes"):
        wanted = allocated + seen.get("requested_bytes", 0)
        said = f"{format_bytes(wanted)} were allocated or asked for"
        if wanted > peak:
            yield (
                f"{said}, and the plan's setting needs {format_bytes(peak)} at its peak: something "
                f"that is not in the plan holds {format_bytes(wanted - peak)} at least."
            )
        else:
            yield (
                f"{said}, of {format_bytes(peak)} that the plan's setting needs at its peak: it "
                "failed on the way there."
            )
    unused, overhead = seen.get("unused_bytes"), predicted.peak_reserved_bytes - peak
    if unused is not None and unused > 2 * overhead + 64 * MIB:
        yield (
            f"{format_bytes(unused)} were reserved but unused; {format_bytes(overhead)} were "
            "predicted."
        )
    if others := seen.get("other_bytes"):
        yield f"Other processes held {format_bytes(others)}; the plan knows of none."
