"""`watch.jsonl`, told: what its last run did, and what was told of it on the way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

from planner.explaining.finding import Finding
from planner.watching.log import MAX_LOG_BYTES

# What to do about an event of `planner.watching.judging` and of the watch itself.
TODO: dict[str, tuple[str, ...]] = {
    "out of memory": ("'planner explain' of the snapshot that it names says what was alive.",),
    "out of memory caught": ("Whoever caught it trains another batch than the plan's.",),
    "allocator retries": ("The setting fits too tightly: expandable segments, or a lever below.",),
    "more allocated than planned": ("Is the model, the batch or the precision another one?",),
    "more reserved than planned": ("PYTORCH_ALLOC_CONF=expandable_segments:True.",),
    "slower than planned": ("Look for throttling, waiting and retries in the same intervals.",),
    "waiting for data": ("'planner data' finds how fast this machine can load.",),
    "throttled": ("Cooling, or other load in the same case: 'planner doctor'.",),
    "non-finite loss": ("Go back to a checkpoint; lower the learning rate, or use bf16.",),
    "non-finite grad_norm": ("Some are a scaler's search; many: lower the learning rate.",),
    "skipped steps": ("Some are a scaler's search; many: use bf16.",),
    "other batch": ("Train with the plan's batch_size and accumulate, or plan this one.",),
    "other device": ("Tune on the device that trains.",),
}


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


def _add(
    findings: dict[str, Finding], number: int, line: dict[str, Any], run: dict[str, Any]
) -> None:
    name, message = str(line.get("event")), str(line.get("message", ""))
    found = findings.setdefault(name, Finding(name, message, todo=TODO.get(name, ())))
    found.see(number, message, run.get("start", {}).get("rank"))
    figures = {k: v for k, v in line.items() if k not in ("kind", "event", "message", "seconds")}
    found.figures = found.figures or figures


def _lines(file: IO[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, raw in enumerate(file.read(2 * MAX_LOG_BYTES).splitlines(), start=1):
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict):
            yield number, line
