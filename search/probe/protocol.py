"""What crosses between the tuner and the workers of a probe, in JSON: each is given a `WorkOrder`,
and answers with progress and one outcome."""

from __future__ import annotations

import os
import uuid
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    model_validator,
)

from planner.core.schema import Model, ProbeStatus, TrainSetting
from planner.core.schema.record import Clocks, RankRecord, Seconds, WorldInfo

# A GPU's clocks rise when work comes and fall as it gets warm. On an NVIDIA H200 (torch 2.11.0,
# 2026-11-26) the first half second of steps was 0.3% slower than 30 s of them; of a card that gets
# hot in seconds nothing was measured.
CUDA_SECONDS = {"warmup_seconds": 0.5, "min_measure_seconds": 1.0, "give_up_seconds": 0.5}
# The least duration of timing of what is probed once more, and of options of the allocator that
# are to be told apart.
FINALIST_SECONDS = 3.0
MEASURE_SECONDS = 10.0  # of timing, at most


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ProbeRequest(Message):
    """What to probe and how long. Bytes are integers, times are seconds; `device` is "cpu" or
    "cuda:N".

    Timing ends after `min_steps` and `min_measure_seconds` as soon as the median is known to
    ±`median_precision` (95%) or there are `max_steps`, and in any case after
    `max_measure_seconds`; earlier, where even the lower bound of the median stays under
    `give_up_images_per_second` after `give_up_seconds`.

    `memory_cap_bytes` emulates a smaller device: on CUDA it holds the caching allocator to what is
    left beside the context; on the CPU it is a limit on the growth of the worker's own memory.

    `warmup_steps` optimizer steps and `warmup_seconds` of them go before those that are timed. What
    is not given of warm-up, least duration and giving up is `CUDA_SECONDS` on a GPU, and no time at
    all on the CPU.
    """

    probe_id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    device: Annotated[str, Field(pattern=r"^(cpu|cuda:\d+)$")] = "cpu"
    min_steps: Annotated[int, Field(ge=1)] = 3
    max_steps: Annotated[int, Field(ge=1)] = 400
    median_precision: Annotated[float, Field(gt=0)] = 0.01
    min_measure_seconds: Annotated[float, Field(ge=0)] = 0.0
    max_measure_seconds: Annotated[float, Field(gt=0)] = MEASURE_SECONDS
    give_up_seconds: Annotated[float, Field(ge=0)] = 0.0
    give_up_images_per_second: float | None = None

    model: Model
    setting: TrainSetting
    memory_cap_bytes: Annotated[int, Field(ge=1)] | None = None
    warmup_steps: Annotated[int, Field(ge=1)] = 2
    warmup_seconds: Annotated[float, Field(ge=0)] = 0.0

    @model_validator(mode="before")
    @classmethod
    def _durations_of_device(cls, values: Any) -> Any:
        if isinstance(values, dict) and str(values.get("device", "cpu")).startswith("cuda"):
            return {**CUDA_SECONDS, **values}
        return values

    @property
    def images_per_step(self) -> int:
        return self.setting.batch_size * self.setting.accumulate


class RankPlace(Message):
    """Which rank of a world a worker is, and how it finds the others: by the file `store`, which
    all of them open. `threads` of the CPU are its own (None: as torch chooses)."""

    rank: Annotated[int, Field(ge=0)]
    store: str
    threads: Annotated[int, Field(ge=1)] | None = None


class WorkOrder(Message):
    """What a worker is given. `deadline` is an instant of `time.monotonic`, which is one clock for
    all processes of a machine; a rank of a world has its `place`."""

    request: ProbeRequest
    deadline: float
    place: RankPlace | None = None


def backend_of(device: str) -> Literal["gloo", "nccl"]:
    """What carries the gradients of ranks on such a device."""
    return "gloo" if device == "cpu" else "nccl"


class ProgressMessage(Message):
    """A worker is in `phase`: import, build, compile, forward, backward, measure … In measure
    `num_steps` optimizer steps were timed so far, at a median of `step_seconds`."""

    type: Literal["progress"] = "progress"
    rank: int = 0
    phase: str
    num_steps: int = 0
    step_seconds: float | None = None


class OutcomeMessage(Message):
    """How a training ended, in which phase, in the fields of a `MeasurementRecord`: a worker's last
    word. `lost_others` is a failure because other ranks of its world are gone, who know why.
    `world` and `ranks` are what the tuner puts together of several.
    """

    type: Literal["outcome"] = "outcome"
    rank: int = 0
    status: ProbeStatus
    phase: str = ""
    lost_others: bool = False
    message: str = ""
    flags: tuple[str, ...] = ()
    step_seconds: tuple[Seconds, ...] = ()
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_bytes: int | None = None
    unit: str | None = None
    compile_seconds: float | None = None
    clocks: Clocks | None = None
    free_bytes: int | None = None
    taken_bytes: int | None = None
    world: WorldInfo | None = None
    ranks: tuple[RankRecord, ...] = ()


Answer = ProgressMessage | OutcomeMessage
ANSWERS: TypeAdapter[Answer] = TypeAdapter(Annotated[Answer, Field(discriminator="type")])


class Report:
    """Tells the tuner where a worker is, and what it has found: one message at a time."""

    def __init__(self, channel: int, rank: int = 0) -> None:
        self.channel, self.rank = channel, rank
        self.phase = ""

    def say(self, message: Answer) -> None:
        stamped = message.model_copy(update={"rank": self.rank})
        os.write(self.channel, stamped.model_dump_json().encode())

    def enter(self, phase: str) -> None:
        """Report that `phase` begins, if it is another than before."""
        if phase != self.phase:
            self.phase = phase
            self.say(ProgressMessage(phase=phase))
