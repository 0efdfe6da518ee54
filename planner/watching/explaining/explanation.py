"""`planner.explain`: from a log or a snapshot to what happened and what to do."""

from __future__ import annotations

import codecs
import zlib
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, cast

from planner.core.errors import PlannerError, UsageError, refuse_if
from planner.core.failures import ANY_TORCH, OUT_OF_MEMORY, TOLD, sentence, told
from planner.core.files import STANDARD_INPUT, named_path, opened_whole, read_pickle
from planner.core.schema import TrainSetting
from planner.core.units import MIB
from planner.watching.explaining.log_reading import FailedRequest, Finding, LogReading
from planner.watching.explaining.snapshot_reading import NO_STACK, SnapshotReading, read_snapshot

if TYPE_CHECKING:
    from planner.advice.advising import Advice
    from planner.estimation.estimate import Estimate
    from planner.machine.hardware.gpu import Gpu

LARGE_CHANGES = "batch_size", "accumulate", "checkpointing", "compile", "offload"
MAX_CARD_ERROR = 0.1  # of the memory: what a driver keeps for itself differs by less
_PICKLE = b"\x80"
_UTF16 = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE
_WHAT = "Name what the training printed, or a snapshot of torch's allocator."


@dataclass(frozen=True)
class Relief:
    """`needed_bytes` must become free at least; `advice` says which ways to train the same free
    them, and `why_none` why there are none."""

    needed_bytes: int
    advice: Advice | None = None
    why_none: str = ""


@dataclass
class Explanation:
    """What was found in `source`. `seen` are the figures at the failure, by name, `expected` what
    the plan's setting needs at its peak; `differs` says how they differ, `relief` which levers free
    enough."""

    source: str
    kind: Literal["log", "snapshot"]
    findings: list[Finding] = field(default_factory=list)
    seen: dict[str, Any] = field(default_factory=dict)
    snapshot: SnapshotReading | None = None
    expected: Estimate | None = None
    differs: tuple[str, ...] = ()
    relief: Relief | None = None
    notes: list[str] = field(default_factory=list)


def explain(
    source: str | PathLike[str],
    plan: object = None,
    *,
    gpu: str | Gpu | None = None,
    allocator: str | None = None,
) -> Explanation:
    """What `source` (a log, a snapshot of torch's allocator; also gzipped, also a pipe; "-" is
    standard input) says of a training that failed, and what to do.

    `plan` is what was to be trained: an Estimate, a Recommendation, or the file or the folder of
    one. What was seen is then held against what was predicted, on `gpu` and with `allocator` where
    the plan does not say, and the levers that free enough are named. Raises UsageError for what
    cannot be read.
    """
    from planner.estimation.arguments import read_gpu

    card, found = read_gpu(gpu), _read(named_path(source, "source"))
    if plan is not None:
        _compare(found, _predicted(plan, card, allocator))
    elif found.seen:
        found.notes.append(sentence("add a plan"))
    return found


# ---------------------------------------------------------------- what each source says


def _read(path: Path) -> Explanation:
    name = "standard input" if str(path) == STANDARD_INPUT else str(path)
    law = f"{name} is no log: planner.watch says what it sees in the training's own."
    refuse_if(path.is_dir() or path.name == "watch.jsonl", law, _WHAT)
    try:
        with opened_whole(path) as file:
            head = file.read(4096)
            file.seek(0)
            if head.startswith(_PICKLE):
                return _of_snapshot(name, read_snapshot(read_pickle(file, name), name))
            if head.startswith(_UTF16):
                file = cast("IO[bytes]", codecs.EncodedFile(file, "utf-8", "utf-16", "replace"))
            elif b"\x00" in head:
                raise ValueError("it is neither text nor a snapshot of torch's allocator")
            return _of_log(name, LogReading().read(file))
    except (OSError, EOFError, ValueError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{name} cannot be read: {reason}.", _WHAT) from None


def _of_log(name: str, reading: LogReading) -> Explanation:
    found = Explanation(name, "log", list(reading.findings.values()))
    found.findings.sort(key=lambda finding: finding.evidence[0][0])
    if reading.failed is not None:
        found.seen, ranks = reading.failed.figures, reading.findings[OUT_OF_MEMORY].ranks
        if len(ranks) > 1:
            words = "" if reading.rank is None else f", rank {reading.rank}"
            found.notes.append(sentence("ranks", ranks=len(ranks), rank=words))
    return found


def _of_snapshot(name: str, reading: SnapshotReading) -> Explanation:
    found = Explanation(name, "snapshot", seen=reading.figures, snapshot=reading)
    if "requested_bytes" in reading.figures:
        failed = FailedRequest(reading.figures)
        found.seen = failed.figures
        means, todo = sentence("snapshot failed", found.seen), failed.ways_out()
        found.findings = [Finding(OUT_OF_MEMORY, means, count=1, figures=found.seen, todo=todo)]
    if reading.categories.keys() == {NO_STACK}:
        found.notes.append(sentence("no stacks"))
    return found


# ---------------------------------------------------------------- held against a plan


def _predicted(plan: Any, card: Gpu | None, allocator: str | None) -> Estimate:
    from planner.estimation.estimate import Estimate, estimate
    from planner.estimation.kept import Predicted, is_predicted, read_predicted
    from planner.machine.hardware.gpu import recognise_gpu
    from planner.trainers.emission import as_result, read_json

    if isinstance(plan, str | PathLike):
        data, source = read_json(named_path(plan, "plan"))
        plan = read_predicted(data, source) if is_predicted(data) else as_result(data, source)
    if isinstance(plan, Estimate):
        return plan
    if plan.setting is None:
        raise UsageError("the plan recommends nothing: no setting fitted.")
    if isinstance(plan, Predicted):
        card, allocator = card or plan.gpu, allocator or plan.allocator
    else:
        card = card or recognise_gpu(plan.device.name, plan.device.total_bytes)
    return estimate(plan.model, plan.setting, gpu=card, allocator=allocator)


def _compare(found: Explanation, predicted: Estimate) -> None:
    seen, peak = found.seen, predicted.peak_allocated_bytes
    overhead = predicted.peak_reserved_bytes - peak
    sizes = {"peak_bytes": peak, "overhead_bytes": overhead}
    sizes["tolerated_bytes"] = 2 * overhead + 64 * MIB
    if allocated := seen.get("allocated_bytes"):
        wanted = allocated + seen.get("requested_bytes", 0)
        sizes |= {"wanted_bytes": wanted, "more_bytes": wanted - peak}
    total, budget = seen.get("total_bytes"), predicted.budget_bytes
    apart = abs(total - budget) if total and budget else 0
    is_other = budget is not None and apart > MAX_CARD_ERROR * budget
    if is_other:
        sizes |= {"budget_bytes": budget or 0, "apart_bytes": apart}
    found.expected, found.differs = predicted, told(TOLD["against_plan"], ANY_TORCH, seen | sizes)
    missing = seen.get("missing_bytes") or seen.get("requested_bytes")
    if missing is not None and is_other:
        found.relief = Relief(int(missing), why_none=sentence("other card"))
    elif missing is not None:
        total = seen.get("total_bytes") or predicted.budget_bytes
        room = total - seen.get("other_bytes", 0) if total else None
        found.relief = find_relief(predicted, int(missing), room)


def find_relief(predicted: Estimate, missing_bytes: int, room_bytes: int | None) -> Relief:
    """Ways to train the same that need at least `missing_bytes` less than `predicted`, and no more
    than `room_bytes` (the card, less what others hold)."""
    from planner.advice.advising import advise

    total = predicted.device_total_bytes
    target = min(total - missing_bytes, total if room_bytes is None else room_bytes)
    needed = total - target
    target -= target % MIB  # as the ways' commands are to be read
    if target <= 0:
        return Relief(needed, why_none="that is more than the whole step needs")
    setting = TrainSetting.model_validate(predicted.setting.model_dump())
    try:
        advised = partial(advise, predicted.model, setting, gpu=predicted.gpu,
                          memory_bytes=target, allocator=predicted.allocator)  # fmt: skip
        advice, least = advised(), advised(keep=LARGE_CHANGES).recommended
    except PlannerError as error:
        return Relief(needed, why_none=error.message)
    if least is not None:  # what keeps the batch comes first, then what is fastest
        others = (way for way in advice.ways if way.setting != least.setting)
        advice = replace(advice, ways=(least, *others))
    return Relief(needed, advice, "" if advice.ways else sentence("no lever"))
