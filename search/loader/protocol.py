"""What crosses between the parent and the worker of one probe of a loader: JSON lines."""

from __future__ import annotations

import uuid
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from planner.schema.loading import (
    DataSource,
    LoaderBound,
    LoaderSetting,
    LoaderStage,
    LoaderStatus,
)
from planner.schema.record import Seconds
from search.probe.protocol import AnswerMessage, PhaseMessage, ProgressMessage, Timing

# A message of several processes must not be torn: writes of up to PIPE_BUF (4096) bytes are not.
MAX_TEXT = 400


class LoaderRequest(Timing):
    """What loader to probe and how long. A step is a batch here, and `min_steps` and `max_steps`
    count rounds: one batch of every worker.

    `warm` reads what will be loaded once before, so that it comes from the page cache.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    probe_id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    source: DataSource
    setting: LoaderSetting
    device: Annotated[str, Field(pattern=r"^(cpu|cuda:\d+)$")] = "cpu"
    warm: bool = False
    seed: int = 0
    min_steps: Annotated[int, Field(ge=1)] = 6
    median_precision: Annotated[float, Field(gt=0)] = 0.02
    min_measure_seconds: Annotated[float, Field(ge=0)] = 1.0

    @property
    def images_per_step(self) -> int:
        return self.setting.batch_size


class LoaderOrder(BaseModel):
    """The one line a worker reads. `deadline_seconds` is what is left when it is sent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    request: LoaderRequest
    deadline_seconds: float


class FaultMessage(AnswerMessage):
    """A process of the loader met an item that cannot be loaded, and took another for it."""

    type: Literal["fault"] = "fault"
    item: str
    message: str


class LoaderOutcome(AnswerMessage):
    """How the probe ended, in the fields of a `LoaderRecord`."""

    type: Literal["outcome"] = "outcome"
    status: LoaderStatus
    message: str = ""
    batch_seconds: tuple[Seconds, ...] = ()
    first_batch_seconds: float | None = None
    cpu_seconds_per_image: float | None = None
    worker_bytes: int | None = None
    main_bytes: int | None = None
    shared_memory_bytes: int | None = None
    open_files: int | None = None
    cold_share: float | None = None
    stage_seconds: dict[LoaderStage, float] = Field(default_factory=dict)
    bound: LoaderBound | None = None
    flags: tuple[str, ...] = ()


LoaderAnswer = PhaseMessage | ProgressMessage | FaultMessage | LoaderOutcome
ANSWERS: TypeAdapter[LoaderAnswer] = TypeAdapter(
    Annotated[LoaderAnswer, Field(discriminator="type")]
)
