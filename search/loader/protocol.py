"""What crosses between the parent and the worker of one probe of a loader: JSON lines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from planner.core.schema.loading import (
    DataSource,
    LoaderBound,
    LoaderSetting,
    LoaderStage,
    LoaderStatus,
)
from planner.core.schema.record import Seconds
from search.probe.protocol import (
    AnswerMessage,
    AnyOutcome,
    Order,
    PhaseMessage,
    ProgressMessage,
    Request,
)

# A message of several processes must not be torn: writes of up to PIPE_BUF (4096) bytes are not.
MAX_TEXT = 400


class LoaderRequest(Request):
    """What loader to probe and how long. A step is a batch here, and `min_steps` and `max_steps`
    count rounds: one batch of every worker.

    `warm` reads what will be loaded once before, so that it comes from the page cache.
    """

    source: DataSource
    setting: LoaderSetting
    warm: bool = False
    min_steps: Annotated[int, Field(ge=1)] = 6
    median_precision: Annotated[float, Field(gt=0)] = 0.02
    min_measure_seconds: Annotated[float, Field(ge=0)] = 1.0

    @property
    def images_per_step(self) -> int:
        return self.setting.batch_size


class LoaderOrder(Order):
    """The order of a probe of a loader."""

    request: LoaderRequest


class FaultMessage(AnswerMessage):
    """A process of the loader met an item that cannot be loaded, and took another for it."""

    type: Literal["fault"] = "fault"
    item: str
    message: str


class LoaderOutcome(AnyOutcome):
    """How the probe ended, in the fields of a `LoaderRecord`."""

    status: LoaderStatus
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


LoaderAnswer = PhaseMessage | ProgressMessage | FaultMessage | LoaderOutcome
ANSWERS: TypeAdapter[LoaderAnswer] = TypeAdapter(
    Annotated[LoaderAnswer, Field(discriminator="type")]
)
