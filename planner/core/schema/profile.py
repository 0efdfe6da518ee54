"""`profile.json`: one setting under torch's profiler, measured beside predicted."""

from __future__ import annotations

from pydantic import BaseModel, Field

from planner.core.schema.figures import KEPT, Whole
from planner.core.schema.record import MeasurementRecord

PROFILE_FORMAT = 2


class ProfiledKind(BaseModel):
    """Seconds of one step by kind of operation: on a GPU of its kernels, on a CPU of the operations
    themselves; `waiting for the host` is the rest of the step."""

    model_config = KEPT

    kind: str
    measured_seconds: float
    predicted_seconds: float | None = None


class ProfiledOperation(BaseModel):
    """An operation of torch: its own seconds (on a GPU those of its kernels) and calls a step."""

    model_config = KEPT

    name: str
    kind: str
    seconds: float
    calls: float


class ProfileRecord(BaseModel):
    """What `planner profile` found. Seconds are of one optimizer step.

    `probe` is the same run as an ordinary probe: model, setting, device, versions, date, and the
    steps that were timed before the profiler began, whose median is `step_seconds`. The measured
    seconds of `kinds` sum to `profiled_step_seconds`, the predicted ones to
    `predicted_step_seconds`. `files` are those written beside this one.
    """

    model_config = KEPT

    format: Whole = PROFILE_FORMAT
    probe: MeasurementRecord
    num_steps: Whole
    step_seconds: float
    profiled_step_seconds: float
    kinds: tuple[ProfiledKind, ...]
    top: tuple[ProfiledOperation, ...]
    predicted_step_seconds: float | None = None
    uncertainty: float | None = None
    basis: str = ""
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = Field(default=(), description="said to the person, one line each")
