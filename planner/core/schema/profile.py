"""`profile.json`: one setting under torch's profiler, measured beside predicted."""

from __future__ import annotations

from pydantic import BaseModel, Field

from planner.core.schema.figures import KEPT, Whole
from planner.core.schema.record import MeasurementRecord

PROFILE_FORMAT = 1


class _Part(BaseModel):
    model_config = KEPT


class ProfiledPart(_Part):
    """Seconds of one step in which the device was busy with one kind of operation in one phase, or
    waited. `predicted_seconds` is None where nothing was predicted; `recomputed_seconds` is the
    part of the measured ones that backward spends on computing a forward again."""

    phase: str
    kind: str
    measured_seconds: float
    predicted_seconds: float | None = None
    recomputed_seconds: float = 0.0


class ProfiledOperation(_Part):
    """An operation of torch (on a CPU) or a kernel (on a GPU): its own seconds and calls a step."""

    name: str
    kind: str
    seconds: float
    calls: float


class ProfileRecord(_Part):
    """What `planner profile` found. Seconds are of one optimizer step.

    `probe` is the same run as an ordinary probe: model, setting, device, versions, date, and the
    steps that were timed before the profiler began. The measured seconds of `parts` sum to
    `profiled_step_seconds`, which is `overhead` times the median of those steps; the predicted ones
    to `predicted_step_seconds`. `unknown` are operations and kernels whose kind is not known: they
    are counted as "other". `files` are those written beside this one.
    """

    format: Whole = PROFILE_FORMAT
    probe: MeasurementRecord
    num_steps: Whole
    step_seconds: float
    profiled_step_seconds: float
    overhead: float
    parts: tuple[ProfiledPart, ...]
    top: tuple[ProfiledOperation, ...]
    predicted_step_seconds: float | None = None
    uncertainty: float | None = None
    basis: str = ""
    unknown: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = Field(default=(), description="said to the person, one line each")
