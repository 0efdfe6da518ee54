"""What a probe over several ranks says of them: the world they were, and each rank by itself."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from planner.core.schema.figures import KEPT, Whole


class WorldInfo(BaseModel):
    """The ranks of one probe, as rank 0 told of them: `world_size` in all, as many on each of
    `nodes`. `backend` carried the gradients, with the NCCL of version `nccl` where it was that;
    `threads` of the CPU were each rank's (None: left as they were). `links` says how the devices
    reach each other, where it was read."""

    model_config = KEPT

    world_size: Whole
    nodes: Whole = 1
    backend: Literal["gloo", "nccl"]
    nccl: str | None = None
    threads: Whole | None = None
    links: tuple[str, ...] = ()


class RankRecord(BaseModel):
    """What one rank measured: the median of its own steps, and its own peaks in bytes.

    Ranks wait for each other in every step, so their steps take alike. `forward_seconds` is the
    first micro-batch's forward, in which a rank waits for nobody (None: it does, as under FSDP):
    in it a slow rank is seen.
    """

    model_config = KEPT

    rank: Whole
    device: str
    step_seconds: float
    forward_seconds: float | None = None
    peak_allocated_bytes: Whole | None = None
    peak_reserved_bytes: Whole | None = None
    device_bytes: Whole | None = None
