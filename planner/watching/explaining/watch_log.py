"""`watch.jsonl`, told: what its last run did, and what was told of it on the way."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import IO, Any

from planner.core.units import MAX_MEMORY_BYTES, MAX_SECONDS
from planner.watching.explaining.finding import MAX_SHOWN, Finding
from planner.watching.watch import MAX_LOG_BYTES

# What to do about an event of `planner.watching.analysis` and of the watch itself.
TODO: dict[str, tuple[str, ...]] = {
    "out of memory": ("'planner explain' of the snapshot that it names says what was alive.",),
    "out of memory caught": ("Whoever caught it trains another batch than the plan's.",),
    "allocator retries": ("The setting fits too tightly: expandable segments, or a change below.",),
    "more allocated than planned": ("Is the model, the batch or the precision another one?",),
    "more reserved than planned": ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",),
    "slower than planned": ("Look for throttling, waiting and retries in the same intervals.",),
    "waiting for data": ("'planner data' finds how fast this machine can load.",),
    "idle device": ("'planner profile' shows what the host does in a step.",),
    "throttled": ("Cooling, or other load in the same case: 'planner doctor'.",),
    "non-finite loss": ("Go back to a checkpoint; lower the learning rate, or use bf16.",),
    "non-finite grad_norm": ("Some are a scaler's search; many: lower the learning rate.",),
    "skipped steps": ("Some are a scaler's search; many: use bf16.",),
    "other batch": ("Train with the plan's batch_size and accumulate, or plan this one.",),
    "other device": ("Tune on the device that trains.",),
}

_MAX_KINDS = 64  # of events


def is_watch_log(first_line: str) -> bool:
    try:
        found = json.loads(first_line)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("kind") == "start" and "planner" in first_line


def read_watch_log(file: IO[bytes]) -> tuple[dict[str, Any], list[Finding]]:
    """The last run's figures (device, plan, end, last interval), and a finding of each kind of
    event in it. Lines that are torn are passed over."""
    run: dict[str, Any] = {}
    findings: dict[str, Finding] = {}
    for number, line in _lines(file):
        kind = line.get("kind")
        if kind == "start":
            run, findings = {"start": line}, {}
        elif kind == "event":
            _add(findings, number, line, run)
        elif kind in ("interval", "end"):
            run[str(kind)] = line
    return run, list(findings.values())


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def _sound(line: dict[str, Any]) -> dict[str, Any]:
    """What is of the kind that a watch writes: anybody may have written the file."""
    checked = ((key, value) for key, value in line.items() if _is_sound(key, value))
    return {k: _sound(v) if isinstance(v, dict) else v for k, v in checked}


def _is_sound(key: str, value: Any) -> bool:
    if key.endswith("_bytes") or key in ("step", "rank"):
        return type(value) is int and 0 <= value <= MAX_MEMORY_BYTES
    if key.endswith(("seconds", "_per_second", "_share")):
        return type(value) in (int, float) and 0 <= value <= MAX_SECONDS
    if key in ("plan", "steady"):
        return isinstance(value, dict)
    return True


def _add(
    findings: dict[str, Finding], number: int, line: dict[str, Any], run: dict[str, Any]
) -> None:
    name = str(line.get("event") or "an event")[:MAX_SHOWN]
    message = str(line.get("message", ""))[:MAX_SHOWN]
    if name not in findings and len(findings) >= _MAX_KINDS:
        return
    found = findings.setdefault(name, Finding(name, message, todo=TODO.get(name, ())))
    found.see(number, message, run.get("start", {}).get("rank"))
    figures = {k: v for k, v in line.items() if k not in ("kind", "event", "message", "seconds")}
    found.figures = found.figures or figures


def _lines(file: IO[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, raw in enumerate(file.read(2 * MAX_LOG_BYTES).splitlines(), start=1):
        try:
            line = json.loads(raw, parse_float=_finite, parse_constant=_finite)
            line = _sound(line) if isinstance(line, dict) else {}
        except (ValueError, RecursionError):
            continue
        if line:
            yield number, line
