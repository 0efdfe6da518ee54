"""An observation: something seen on a device that measures no setting, as one JSON line."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from planner.schema.record import DeviceInfo

OBSERVATION_FORMAT = 1

Sight = Literal[
    "driver", "memory-return", "one-step", "attention-memory", "near-limit", "timing",
    "compile-cache", "context", "attention-kernels", "attention-rate", "snapshot",
]  # fmt: skip
ObservationStatus = Literal["seen", "not_here", "failed", "timed_out", "crashed"]


class Observation(BaseModel):
    """What is to be seen, as a matrix says it.

    `name` tells it from others of the same kind (`see`); `what` is for people. `setting` holds
    fields of a `TrainSetting` and is not resolved: what the planner itself refuses can be seen.
    `deadline` is in seconds; where the budget leaves less, `when_short` replaces the fields it
    names. `seconds` are durations, `share` a share of the memory that a step needs, `steps` how
    many are run, `environment` is set for the process that looks.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    name: Annotated[str, Field(min_length=1)]
    see: Sight
    what: str
    model: str = ""
    overrides: dict[str, str] = Field(default_factory=dict)
    setting: dict[str, Any] = Field(default_factory=dict)
    deadline: Annotated[float, Field(gt=0)] = 60.0
    seconds: tuple[Annotated[float, Field(gt=0)], ...] = ()
    share: Annotated[float, Field(gt=0)] = 1.0
    steps: Annotated[int, Field(ge=1)] = 1
    environment: dict[str, str] = Field(default_factory=dict)
    when_short: dict[str, Any] = Field(default_factory=dict)

    def shortened(self) -> Observation:
        """The shorter form of it, which `when_short` gives."""
        return Observation.model_validate({**self.model_dump(), **self.when_short})


class ObservationRecord(BaseModel):
    """What was seen. Bytes are integers, times are seconds, `date` is ISO 8601 in UTC.

    `status` is about the looking: an error that was looked for is `seen`, and `message` is its
    text. `figures` are those that were seen before it ended, however it ended; `not_here` says of
    the others why this device cannot show them. A rehearsal's figures are of a tiny model.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    observation: str = Field(description="its name; what tells this line from a measurement")
    format: int = OBSERVATION_FORMAT
    see: Sight
    what: str
    model: str = ""
    setting: dict[str, JsonValue] = Field(default_factory=dict)
    environment: dict[str, str] = Field(default_factory=dict)
    device: DeviceInfo
    versions: dict[str, str]
    date: str
    status: ObservationStatus
    message: str = ""
    figures: dict[str, JsonValue] = Field(default_factory=dict)
    not_here: dict[str, str] = Field(default_factory=dict)
    seconds: float = 0.0
    rehearsal: bool = False
    cut_short: bool = Field(default=False, description="the budget ended it")
