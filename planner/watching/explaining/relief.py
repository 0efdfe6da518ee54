"""Which levers free what was missing: asked of `planner.advise`, for the setting that failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from planner.advice.advising import advise
from planner.core.errors import PlannerError
from planner.core.schema import TrainSetting
from planner.core.units import MIB
from planner.estimation.estimate import Estimate
from planner.machine.hardware.gpu import Gpu

MAX_WAYS = 3


@dataclass(frozen=True)
class Lever:
    """One way to need less: what changes, the bytes that it frees of the device, the rate in images
    a second (predicted, as that of the setting as it is), what it changes for the result."""

    changes: dict[str, Any]
    freed_bytes: int
    images_per_second: float
    effects: tuple[str, ...]
    command: str


@dataclass(frozen=True)
class Relief:
    """`needed_bytes` must become free at least; `images_per_second` is the setting's as it is;
    `why_none` says why there are no levers."""

    needed_bytes: int
    images_per_second: float | None
    levers: tuple[Lever, ...]
    rated: str = ""
    why_none: str = ""


def find_relief(
    predicted: Estimate,
    missing_bytes: int,
    room_bytes: int | None,
    gpu: Gpu | None,
    allocator: str | None,
) -> Relief:
    """Ways to train the same that need at least `missing_bytes` less than `predicted`, and no more
    than `room_bytes` (the card, less what others hold)."""
    target = predicted.device_total_bytes - missing_bytes
    if room_bytes is not None:
        target = min(target, room_bytes)
    needed = predicted.device_total_bytes - target
    target -= target % MIB  # as the levers' commands are to be read
    if target <= 0:
        return Relief(needed, None, (), why_none="that is more than the whole step needs")
    try:
        advice = advise(
            predicted.model, TrainSetting.model_validate(predicted.setting.model_dump()), gpu=gpu,
            memory_bytes=target, allocator=allocator,
        )  # fmt: skip
    except PlannerError as error:
        return Relief(needed, None, (), why_none=error.message)
    rate = advice.plain.estimate.throughput
    fitting = {way.command: way for way in (advice.recommended, *advice.ways) if way is not None}
    levers = tuple(
        Lever(
            dict(way.changes), predicted.device_total_bytes - way.estimate.device_total_bytes,
            way.images_per_second, way.effects, way.command,
        )
        for way in list(fitting.values())[:MAX_WAYS]
    )  # fmt: skip
    why_none = "" if fitting else "no change that planner knows frees so much"
    return Relief(needed, rate.images_per_second if rate else None, levers, advice.rated, why_none)
