"""What a search expected of a probe when it chose it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from planner.core.schema.figures import KEPT

Range = tuple[float, float, float]


class Expected(BaseModel):
    """What a search believed that a probe would find, at the moment it chose it.

    Figures are (low, middle, high): as likely above the middle as below it, and with 95% between
    low and high, the noise of a measurement included. `used_bytes` is held against the record's
    property of that name. `basis` is "prior" where no probe had taught the search anything yet,
    else "probes". `fits` is the probability of staying within the memory that the search allows;
    None where it has no limit.
    """

    model_config = KEPT

    phase: str
    basis: Literal["prior", "probes"]
    images_per_second: Range | None = None
    used_bytes: Range | None = None
    fits: float | None = None
