"""`planner.explain`: from a log, a `watch.jsonl` or a snapshot to what happened and what to do."""

from __future__ import annotations

import codecs
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, cast

from planner.core.errors import PlannerError, UsageError
from planner.core.failures import OUT_OF_MEMORY, SAID, sentence
from planner.core.files import STANDARD_INPUT, named_path, opened_whole
from planner.core.units import MAX_MEMORY_BYTES, MAX_SECONDS, MIB
from planner.memory.snapshot import read_pickle
from planner.watching.explaining.allocator_message import read_message, ways_out
from planner.watching.explaining.log_reading import MAX_SHOWN, Finding, LogReading
from planner.watching.explaining.snapshot_reading import SnapshotReading, read_snapshot
from planner.watching.watch import MAX_LOG_BYTES

if TYPE_CHECKING:
    from planner.estimation.arguments import ModelLike, SettingLike
    from planner.estimation.estimate import Estimate
    from planner.machine.hardware.gpu import Gpu
    from planner.watching.explaining.relief import Relief

_HEAD_BYTES = 65_536  # the first line of a watch.jsonl has the plan in it
_PICKLE = b"\x80"
_UTF16 = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE
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

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "run": self.run or None}


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
        found.notes.append(sentence("add a plan"))
    return found


# ---------------------------------------------------------------- what each source says


def _read(path: Path) -> Explanation:
    if path.is_dir():
        if not (path / "watch.jsonl").is_file():
            raise UsageError(
                f"{path} is a folder without a watch.jsonl.",
                "Name a log, a snapshot or a watch.jsonl.",
            )
        path /= "watch.jsonl"
    name = "standard input" if str(path) == STANDARD_INPUT else str(path)
    try:
        with opened_whole(path) as file:
            head = file.read(_HEAD_BYTES)
            file.seek(0)
            if head.startswith(_PICKLE):
                return _of_snapshot(name, read_snapshot(read_pickle(file, name)))
            if head.startswith(_UTF16):
                file = cast("IO[bytes]", codecs.EncodedFile(file, "utf-8", "utf-16", "replace"))
            elif b"\x00" in head[:4096]:
                raise UsageError(
                    f"{name} is neither text nor a snapshot of torch's allocator.",
                    "Write one with torch.cuda.memory._dump_snapshot(path).",
                )
            first = _line(head.partition(b"\n")[0])
            if first.get("kind") == "start" and "planner" in json.dumps(first):
                return _of_watch(name, file)
            return _of_log(name, LogReading().read(file))
    except (OSError, EOFError, ValueError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{name} cannot be read: {reason}.") from None


def _of_log(name: str, reading: LogReading) -> Explanation:
    found = Explanation(name, "log", list(reading.findings.values()))
    found.findings.sort(key=lambda finding: finding.evidence[0][0])
    if reading.first is not None:
        rank, message = reading.first
        found.seen = message.sizes
        if len(reading.messages) > 1:
            words = f", rank {rank}" if rank is not None else ""
            found.notes.append(sentence("ranks", ranks=len(reading.messages), rank=words))
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
        figures = {
            "requested_bytes": reading.requested_bytes,
            "free_bytes": reading.device_free_bytes or 0,
            "missing_bytes": reading.missing_bytes,
        }
        found.seen |= figures
        largest = {"largest_free_bytes": reading.largest_free_bytes}
        means = sentence("snapshot failed", figures | largest)
        todo = tuple(reading.ways_out())
        found.findings.append(Finding(OUT_OF_MEMORY, means, count=1, figures=figures, todo=todo))
    if not reading.has_stacks and reading.allocated_bytes:
        found.notes.append(sentence("no stacks"))
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
                todo = tuple(SAID["watch_events"].get(event, ()))
                one = findings.setdefault(event, Finding(event, message, todo=todo))
                one.see(number, message, run.get("start", {}).get("rank"))
                told = ("kind", "event", "message", "seconds")
                one.figures = one.figures or {k: v for k, v in line.items() if k not in told}
    found = Explanation(name, "watch", list(findings.values()), run=run)
    if OUT_OF_MEMORY in findings:
        found.seen = dict(findings[OUT_OF_MEMORY].figures)
        if said := read_message(str(found.seen.get("text"))):
            found.seen |= said.sizes
            findings[OUT_OF_MEMORY].todo = tuple(ways_out(said, said.torch))
    if "end" not in run:
        found.notes.append(sentence("no last line"))
    return found


def _line(raw: bytes) -> dict[str, Any]:
    """What is of the kind that a watch writes: anybody may have written the file."""
    try:
        line = json.loads(
            raw, parse_float=_finite, parse_constant=_finite, object_pairs_hook=_sound
        )
    except (ValueError, RecursionError):
        return {}
    return line if isinstance(line, dict) else {}


def _finite(text: str) -> float | None:
    return float(text) if math.isfinite(float(text)) else None


def _sound(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in pairs if _is_sound(key, value)}


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
            with suppress(PlannerError):  # a card that the catalogue does not have
                card = find_gpu(result.device.name)
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
        key = "more than planned" if wanted > peak else "on the way"
        yield sentence(key, {"wanted": wanted, "peak": peak, "more": wanted - peak})
    overhead = predicted.peak_reserved_bytes - peak
    if (seen.get("unused_bytes") or 0) > 2 * overhead + 64 * MIB:
        yield sentence("unused unplanned", {**seen, "overhead": overhead})
