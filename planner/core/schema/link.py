"""How fast devices exchange data: a curve that was measured, as one JSON object."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from planner.core.collectives import Collective
from planner.core.schema.figures import KEPT, Whole

LINK_FORMAT = 1


class LinkPoint(BaseModel):
    """One collective of `num_bytes` of the whole array (as nccl-tests counts), in seconds of its
    slowest rank: the median of its repetitions."""

    model_config = KEPT

    collective: Collective
    num_bytes: Annotated[int, Field(ge=1)]
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]


class LinkCurve(BaseModel):
    """Collectives over sizes between `world_size` devices on `nodes` machines.

    `backend` is "nccl" or "gloo"; `versions` those of torch and NCCL; `variables` the environment's
    that change a collective (NCCL_*); `topology` says how the devices are joined, where it was
    read; `date` is ISO 8601 in UTC.
    """

    model_config = KEPT

    link_format: Whole = LINK_FORMAT
    device: str
    backend: str
    world_size: Annotated[int, Field(ge=1)]
    nodes: Annotated[int, Field(ge=1)] = 1
    points: tuple[LinkPoint, ...]
    versions: dict[str, str] = Field(default_factory=dict)
    variables: dict[str, str] = Field(default_factory=dict)
    topology: str = ""
    date: str = ""
    source: str = Field(default="", description="of a published curve: where it was read")


def bus_factor(collective: Collective, world_size: int) -> float:
    """Bus bandwidth over `num_bytes / seconds`, as nccl-tests defines it (doc/PERFORMANCE.md): what
    each link carries, so that worlds of any size compare."""
    others = (world_size - 1) / world_size
    if collective == "all_reduce":
        return 2 * others
    return 1.0 if collective == "broadcast" else others
