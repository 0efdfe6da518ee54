"""The ranks of a world: where each is, and what they measured, as one: memory of the fullest, time
of the slowest."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from planner.core.schema import TrainSetting
from planner.core.schema.record import RankRecord, WorldInfo
from search.probe.protocol import OutcomeMessage, RankPlace, backend_of


def rank_devices(device: str, setting: TrainSetting) -> tuple[str, ...]:
    """The device of each rank: for GPUs one after the other, from `device` on."""
    if setting.parallelism == "none":
        return (device,)
    size = setting.world_size
    if device == "cpu":
        return ("cpu",) * size
    first = int(device[5:])
    return tuple(f"cuda:{first + rank}" for rank in range(size))


@contextmanager
def rank_places(size: int, threads: int | None = None) -> Iterator[tuple[RankPlace, ...]]:
    """The place of each rank, while this lasts. They find each other by a file that only lives in
    this process's memory: no port that somebody else may take, nothing to delete."""
    descriptor = os.memfd_create("planner-world")
    store = f"/proc/{os.getpid()}/fd/{descriptor}"
    try:
        yield tuple(RankPlace(rank=r, store=store, threads=threads) for r in range(size))
    finally:
        os.close(descriptor)


# Of which the largest of any rank stands for all.
_LARGEST = (
    "peak_allocated_bytes", "peak_reserved_bytes", "device_bytes", "compile_seconds", "taken_bytes",
)  # fmt: skip


def put_together(outcomes: Sequence[OutcomeMessage], devices: Sequence[str]) -> OutcomeMessage:
    """The outcome of a probe whose ranks have all measured, rank 0 first: each step as long as on
    its slowest rank, each peak the highest."""
    steps = zip(*(o.step_seconds for o in outcomes), strict=False)  # all have taken the same
    free = [o.free_bytes for o in outcomes if o.free_bytes is not None]
    return outcomes[0].model_copy(
        update={
            **{name: _largest(outcomes, name) for name in _LARGEST},
            "step_seconds": tuple(max(step) for step in steps),
            "free_bytes": min(free, default=None),
            "flags": shared_flags([o.flags for o in outcomes]),
            "ranks": tuple(
                RankRecord(
                    rank=rank,
                    device=device,
                    step_seconds=median(outcome.step_seconds),
                    peak_allocated_bytes=outcome.peak_allocated_bytes,
                    peak_reserved_bytes=outcome.peak_reserved_bytes,
                    device_bytes=outcome.device_bytes,
                )
                for rank, (outcome, device) in enumerate(zip(outcomes, devices, strict=True))
            ),
            "world": WorldInfo(world_size=len(devices), backend=backend_of(devices[0])),
        }
    )


def _largest(outcomes: Sequence[OutcomeMessage], name: str) -> float | None:
    figures = (getattr(outcome, name) for outcome in outcomes)
    return max((figure for figure in figures if figure is not None), default=None)


def shared_flags(flags: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """What all ranks say, once; and what only some of them say, with their numbers."""
    said: dict[str, list[int]] = {}
    for rank, own in enumerate(flags):
        for flag in dict.fromkeys(own):
            said.setdefault(flag, []).append(rank)
    return tuple(
        flag if len(ranks) == len(flags) else f"rank {', '.join(map(str, ranks))}: {flag}"
        for flag, ranks in said.items()
    )
