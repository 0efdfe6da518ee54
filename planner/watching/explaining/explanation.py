"""`planner.explain`: from a log, a `watch.jsonl` or a snapshot to what happened and what to do."""

from __future__ import annotations

import codecs
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from planner.core.errors import PlannerError, UsageError
from planner.core.failures import OUT_OF_MEMORY
from planner.core.files import named_path
from planner.core.schema.record import noteworthy_bytes
from planner.core.units import MIB, format_bytes
from planner.watching.explaining.finding import Finding

if TYPE_CHECKING:
    from planner.estimation.arguments import ModelLike, SettingLike
    from planner.estimation.estimate import Estimate
    from planner.machine.hardware.gpu import Gpu
    from planner.watching.explaining.allocator_message import AllocatorMessage
    from planner.watching.explaining.relief import Relief
    from planner.watching.explaining.snapshot_reading import SnapshotReading

Kind = Literal["log", "watch", "snapshot"]
_PICKLE = b"\x80"
_UTF16 = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
# From this share of what is reserved on, memory that no tensor uses is worth a word.
_UNUSED_SHARE = 0.1


@dataclass
class Explanation:
    """What was found in `source`. `seen` are the bytes at the failure, by name, `expected` what the
    plan's setting needs at its peak; `differs` says how they differ, `relief` which levers free
    enough. `run` is of a `watch.jsonl`, `snapshot` of a snapshot."""

    source: str
    kind: Kind
    findings: list[Finding] = field(default_factory=list)
    seen: dict[str, Any] = field(default_factory=dict)
    snapshot: SnapshotReading | None = None
    run: dict[str, Any] = field(default_factory=dict)
    expected: Estimate | None = None
    differs: list[str] = field(default_factory=list)
    relief: Relief | None = None
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "kind": self.kind,
            "findings": [finding.to_json() for finding in self.findings],
            "seen": self.seen,
            "snapshot": self.snapshot.to_json() if self.snapshot else None,
            "run": self.run or None,
            "expected": self.expected.to_json() if self.expected else None,
            "differs": self.differs,
            "relief": self.relief.to_json() if self.relief else None,
            "notes": self.notes,
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
    path = named_path(source, "source")
    found = _read(path)
    meant = _meant(model, setting, plan, gpu, overrides)
    if meant is not None:
        _compare(found, *meant, allocator)
    elif found.kind != "watch" and found.seen:
        found.notes.append(
            "Add --plan RUN, or MODEL and its options, to see which changes free enough memory."
        )
    return found


def _read(path: Path) -> Explanation:
    from planner.watching.explaining.opening import STANDARD_INPUT, from_the_beginning, opened

    if path.is_dir():
        inner = path / "watch.jsonl"
        if not inner.is_file():
            raise UsageError(
                f"{path} is a folder without a watch.jsonl.",
                "Name a log, a snapshot or a watch.jsonl.",
            )
        path = inner
    name = "standard input" if str(path) == STANDARD_INPUT else str(path)
    try:
        with opened(path) as raw:
            head, file = from_the_beginning(raw)
            if head.startswith(_PICKLE):
                return _of_snapshot(name, file)
            encoding = next((name for bom, name in _UTF16.items() if head.startswith(bom)), "utf-8")
            if encoding == "utf-8" and b"\x00" in head[:4096]:
                raise UsageError(
                    f"{name} is neither text nor a snapshot of torch's allocator.",
                    "Write one with torch.cuda.memory._dump_snapshot(path).",
                )
            from planner.watching.explaining.watch_log import is_watch_log

            if is_watch_log(head.partition(b"\n")[0].decode(errors="replace")):
                return _of_watch(name, file)
            return _of_log(name, file, encoding)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{name} cannot be read: {reason}.") from None


# ---------------------------------------------------------------- what each source says


def _of_log(name: str, file: IO[bytes], encoding: str) -> Explanation:
    from planner.watching.explaining.log_reading import LogReading

    reading = LogReading().read(file, encoding)
    found = Explanation(name, "log", list(reading.findings.values()))
    found.findings.sort(key=lambda finding: finding.evidence[0][0])
    first = reading.first
    if first is not None:
        rank, message = first
        found.seen = message.to_json()
        finding = reading.findings[OUT_OF_MEMORY]
        finding.figures = message.to_json()
        finding.todo = tuple(_of_message(message))
        if len(reading.messages) > 1:
            found.notes.append(
                f"{len(reading.messages)} ranks ran out of memory; the figures are of the first"
                + (f", rank {rank}." if rank is not None else ".")
            )
    return found


def _of_message(message: AllocatorMessage) -> list[str]:
    """What the figures of torch's message advise, most certain first."""
    todo = []
    unused, others = message.unused_bytes or 0, message.other_bytes or 0
    held = (message.allocated_bytes or 0) + unused
    limit = message.allowed_bytes or message.total_bytes
    if limit is not None and message.requested_bytes > limit:
        todo.append(
            f"One request of {format_bytes(message.requested_bytes)} is larger than the device: "
            "only a smaller micro-batch, or another algorithm, makes it smaller."
        )
    if others and others >= noteworthy_bytes(message.total_bytes or 0):
        enough = ", more than this request lacked" if others >= message.missing_bytes else ""
        todo.append(f"Other processes hold {format_bytes(others)}{enough}: end them (nvidia-smi).")
    if message.private_pool_bytes:
        todo.append(_on_private_pools(message.private_pool_bytes))
    if unused > _UNUSED_SHARE * max(held, 1):
        todo.append(_on_fragments(unused, message.requested_bytes))
    if message.allowed_bytes is not None:
        todo.append(f"The process was allowed {format_bytes(message.allowed_bytes)} only.")
    elif message.free_bytes is not None and message.free_bytes > message.requested_bytes:
        todo.append(
            f"The driver refused although it calls {format_bytes(message.free_bytes)} free: it "
            "keeps some back (as on Windows), or what is free is in pieces."
        )
    todo.append(
        f"Free at least {format_bytes(message.missing_bytes)} for this request; the "
        "rest of the step may need more."
    )
    return todo


def _on_fragments(unused: int, requested: int) -> str:
    more = "more than the request" if unused >= requested else "less than the request"
    return (
        f"{format_bytes(unused)} are reserved but unused, {more}: free blocks that are too "
        "small or of another pool. PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lets most "
        "of them be used."
    )


def _on_private_pools(num_bytes: int) -> str:
    return (
        f"{format_bytes(num_bytes)} are in pools of CUDA graphs, which give nothing back: "
        "--compile default in place of reduce-overhead."
    )


def _of_watch(name: str, file: IO[bytes]) -> Explanation:
    from planner.watching.explaining.watch_log import read_watch_log

    run, findings = read_watch_log(file)
    found = Explanation(name, "watch", findings, run=run)
    for finding in findings:
        if finding.kind == OUT_OF_MEMORY:
            figures = finding.figures
            text = figures.get("text")
            if isinstance(text, str):
                from planner.watching.explaining.allocator_message import read_message

                message = read_message(text)
                figures = {**figures, **(message.to_json() if message else {})}
            found.seen = figures
            requested = figures.get("requested_bytes")
            if requested is not None and "missing_bytes" not in figures:
                found.seen["missing_bytes"] = max(requested - figures.get("free_bytes", 0), 1)
    if "end" not in run:
        found.notes.append(
            "The log has no last line: the process was killed, or it is still running."
        )
    return found


def _of_snapshot(name: str, file: IO[bytes]) -> Explanation:
    from planner.memory.snapshot import read_pickle
    from planner.watching.explaining.snapshot_reading import read_snapshot

    reading = read_snapshot(read_pickle(file, name))
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
        found.findings.append(_failed_request(reading))
    if not reading.has_stacks and reading.allocated_bytes:
        found.notes.append(
            "The snapshot has no stacks, so that it says sizes and not places: record a history "
            "(planner.watch(…, history=100_000), or torch.cuda.memory._record_memory_history())."
        )
    return found


def _failed_request(reading: SnapshotReading) -> Finding:
    requested = reading.requested_bytes
    assert requested is not None
    todo = []
    if reading.free_bytes > _UNUSED_SHARE * max(reading.reserved_bytes, 1):
        if reading.is_expandable:
            todo.append(
                f"{format_bytes(reading.free_bytes)} are reserved but unused although segments "
                "are expandable: they are of other streams or pools."
            )
        else:
            todo.append(_on_fragments(reading.free_bytes, requested))
    if reading.private_pool_bytes:
        todo.append(_on_private_pools(reading.private_pool_bytes))
    if reading.waiting_bytes:
        todo.append(
            f"{format_bytes(reading.waiting_bytes)} are free for one stream and still awaited by "
            "another (record_stream)."
        )
    return Finding(
        OUT_OF_MEMORY,
        f"A request of {format_bytes(requested)} failed: the largest free block has "
        f"{format_bytes(reading.largest_free_bytes)}, and the driver had "
        f"{format_bytes(reading.device_free_bytes or 0)}.",
        count=1,
        figures={"requested_bytes": requested, "missing_bytes": reading.missing_bytes},
        todo=tuple(todo),
    )


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
    found.differs += _differences(found, predicted)
    missing = found.seen.get("missing_bytes")
    if missing is None:
        return
    total = found.seen.get("total_bytes") or (gpu.memory_bytes if gpu else None)
    room = total - found.seen.get("other_bytes", 0) if total is not None else None
    found.relief = find_relief(predicted, int(missing), room, gpu, allocator)


def _differences(found: Explanation, predicted: Estimate) -> list[str]:
    said = []
    seen, peak = found.seen.get("allocated_bytes"), predicted.peak_allocated_bytes
    if seen:
        wanted = seen + found.seen.get("requested_bytes", 0)
        if wanted > peak:
            said.append(
                f"{format_bytes(wanted)} were allocated or asked for, and the plan's setting needs "
                f"{format_bytes(peak)} at its peak: something that is not in the plan holds "
                f"{format_bytes(wanted - peak)} at least."
            )
        else:
            said.append(
                f"{format_bytes(wanted)} were allocated or asked for, of {format_bytes(peak)} that "
                "the plan's setting needs at its peak: it failed on the way there."
            )
    unused = found.seen.get("unused_bytes")
    overhead = predicted.peak_reserved_bytes - peak
    if unused is not None and unused > 2 * overhead + 64 * MIB:
        said.append(
            f"{format_bytes(unused)} were reserved but unused; {format_bytes(overhead)} were "
            "predicted."
        )
    others = found.seen.get("other_bytes")
    if others:
        said.append(f"Other processes held {format_bytes(others)}; the plan knows of none.")
    return said
