"""A running training held against its plan: from an interval's figures to events. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from planner.core.units import format_bytes
from planner.watching.expectation import Expectation

# From where on a difference is worth a line. Judgements: repeated probes of one setting differ by
# a few percent in time and by less than one in bytes.
MEMORY_SLACK = 0.05
RATE_SLACK = 0.10
WAIT_SHARE = 0.10
BUSY_PERCENT = 80
_BATCH_SLACK = 0.02


@dataclass(frozen=True)
class Event:
    """Something to say once: `name` is its kind, `message` a sentence for a person, `figures` what
    it rests on."""

    name: str
    message: str
    figures: dict[str, Any]


def judge(
    line: dict[str, Any], before: dict[str, Any], expected: Expectation | None, device: str
) -> Iterator[Event]:
    """The events of an interval; `before` is the one before it (empty for the first)."""
    yield from _failures(line, before)
    yield from _loss(line, before)
    yield from _throttling(line)
    yield from _waiting(line, expected)
    yield from _idle(line)
    if expected is None:
        return
    yield from _batch(line, expected)
    yield from _memory(line, expected)
    if expected.device in (None, device):
        yield from _rate(line, expected)
    else:
        yield Event(
            "other device",
            f"The plan is of {expected.device} and this is {device}: rates are not compared.",
            {"expected": expected.device, "seen": device},
        )


def _failures(line: dict[str, Any], before: dict[str, Any]) -> Iterator[Event]:
    retries = line.get("alloc_retries", 0) - before.get("alloc_retries", 0)
    if retries > 0:
        yield Event(
            "allocator retries",
            f"{retries} allocations succeeded only after cached memory was given back: the device "
            "is full, and each retry waits for it.",
            {"retries": retries},
        )
    caught = line.get("ooms", 0) - before.get("ooms", 0)
    if caught > 0:
        yield Event(
            "out of memory caught",
            f"{caught} out-of-memory errors were raised and the training went on.",
            {"ooms": caught},
        )


def _loss(line: dict[str, Any], before: dict[str, Any]) -> Iterator[Event]:
    loss = line.get("loss")
    if loss is not None and not abs(loss) < float("inf"):
        yield Event("non-finite loss", f"The loss is {loss}.", {"loss": loss})
    scale, was = line.get("scale"), before.get("scale")
    if scale and was and scale < was:
        yield Event(
            "skipped steps",
            f"The loss scale fell from {was:g} to {scale:g}: at least one optimizer step was "
            "skipped, because gradients overflowed fp16.",
            {"scale": scale, "before": was},
        )


def _throttling(line: dict[str, Any]) -> Iterator[Event]:
    clocks = line.get("clocks") or {}
    reasons = clocks.get("slowed_by") or ()
    if reasons:
        yield Event(
            "throttled",
            f"The device slowed itself down ({', '.join(reasons)}), at up to "
            f"{clocks.get('temperature_c', '?')} °C.",
            {"reasons": list(reasons)},
        )


def _idle(line: dict[str, Any]) -> Iterator[Event]:
    """Only where it is known that data are not what the device waits for."""
    busy, waited = (line.get("clocks") or {}).get("busy_percent"), line.get("wait_share")
    if busy is None or waited is None or line.get("warm_up"):
        return
    if busy + 100 * waited < BUSY_PERCENT:
        yield Event(
            "idle device",
            f"Some kernel ran on the device for only {busy:.0f}% of the time (nvidia-smi's "
            "utilisation), and it is not the loader that it waited for: what the loop does between "
            "steps, or the host's launches.",
            {"busy_percent": busy},
        )


def _waiting(line: dict[str, Any], expected: Expectation | None) -> Iterator[Event]:
    share = line.get("wait_share")
    allowed = WAIT_SHARE + ((expected.waiting_share or 0.0) if expected else 0.0)
    if share is not None and share > allowed and not line.get("warm_up"):
        yield Event(
            "waiting for data",
            f"{share:.0%} of the time the loop waited for batches: the loader is too slow.",
            {"wait_share": share},
        )


def _batch(line: dict[str, Any], expected: Expectation) -> Iterator[Event]:
    steps, images = line.get("steps"), line.get("images")
    if not steps or not images or expected.images_per_step is None:
        return
    seen = images / steps
    if abs(seen - expected.images_per_step) > _BATCH_SLACK * expected.images_per_step:
        yield Event(
            "other batch",
            f"A step has {seen:.4g} images on this device, and the plan's has "
            f"{expected.images_per_step}: memory and rates differ for that reason too.",
            {"seen": seen, "expected": expected.images_per_step},
        )


def _memory(line: dict[str, Any], expected: Expectation) -> Iterator[Event]:
    for kind in ("allocated", "reserved"):
        seen = line.get(f"peak_{kind}_bytes")
        said = getattr(expected, f"peak_{kind}_bytes")
        if seen and said and seen > said * (1 + MEMORY_SLACK):
            yield Event(
                f"more {kind} than planned",
                f"At the peak {format_bytes(seen)} were {kind}, {seen / said - 1:.0%} more than "
                f"the plan's {format_bytes(said)} ({expected.basis}).",
                {"seen": seen, "expected": said},
            )


def _rate(line: dict[str, Any], expected: Expectation) -> Iterator[Event]:
    seen, said = line.get("images_per_second"), expected.images_per_second
    if seen and said and seen < said * (1 - RATE_SLACK) and not line.get("warm_up"):
        yield Event(
            "slower than planned",
            f"{seen:.4g} images/s are {1 - seen / said:.0%} less than the plan's {said:.4g} "
            f"({expected.basis}).",
            {"seen": seen, "expected": said},
        )
