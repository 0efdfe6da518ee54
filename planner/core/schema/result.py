"""`recommendation.json`: the setting to use, the probes that prove it, and the runners-up."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, JsonValue

from planner.core.schema.any_model import Model
from planner.core.schema.figures import KEPT, Whole
from planner.core.schema.loading import Feeding
from planner.core.schema.record import DeviceInfo, MeasurementRecord
from planner.core.schema.setting import TrainSetting

RESULT_FORMAT = 1


class Excluded(BaseModel):
    """A setting that was not probed, and why: an estimate or another probe ruled it out."""

    model_config = KEPT

    setting: TrainSetting
    reason: str
    predicted_bytes: Whole | None = None


class Recommendation(BaseModel):
    """What `planner tune` found. `setting` was run: `evidence` is its own measurement.

    `status` is "recommended", or "nothing_fits" where no probe ran and fit, or none was made
    (then `setting` and `evidence` are None, and `advice` says why and what next).
    `baseline` is the plain default (fp32, eager, no checkpointing, largest batch that fits) where
    it was measured; `gain` is images/s of the recommendation over the baseline's.
    """

    model_config = KEPT

    format: Whole = RESULT_FORMAT
    status: Literal["recommended", "nothing_fits"]
    model: Model
    device: DeviceInfo
    versions: dict[str, str]
    date: str
    setting: TrainSetting | None
    evidence: MeasurementRecord | None
    runners_up: tuple[MeasurementRecord, ...] = ()
    baseline: MeasurementRecord | None = None
    gain: float | None = None
    num_probes: Whole = 0
    num_candidates: Whole = 0
    stopped_because: str = ""
    ruled_out: tuple[Excluded, ...] = ()
    notes: tuple[str, ...] = Field(default=(), description="said to the person, one line each")
    advice: str = ""
    feeding: Feeding | None = Field(default=None, description="where the data were measured too")
    asked: dict[str, JsonValue] | None = Field(
        default=None,
        description="the search's options that are not the defaults, as keywords of `search.tune`",
    )
