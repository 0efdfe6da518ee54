"""What crosses between the tuner and a probe's worker: JSON lines, versioned, never trusted.

The parent writes one `WorkOrder` and reads phases, progress and one outcome. Each message carries
the format's number and the probe's id: what is malformed, too long, of another format or of
another probe is garbage, counted and left.
"""

from __future__ import annotations

import os
import uuid
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from planner.core.schema import Model, ProbeStatus, TrainSetting
from planner.core.schema.record import Clocks, PhaseBytes, RankRecord, Seconds, WorldInfo

# Longer than any message of ours (a thousand samples take about 25 kB), short enough that a flood
# without a newline costs the parent nothing.
MAX_MESSAGE_BYTES = 1 << 20
# A GPU's clocks rise when work comes and fall as it gets warm. On an NVIDIA H200 (torch 2.11.0,
# 2026-11-26) the first half second of steps was 0.3% slower than 30 s of them; of a card that gets
# hot in seconds nothing was measured.
CUDA_SECONDS = {"warmup_seconds": 0.5, "min_measure_seconds": 1.0, "give_up_seconds": 0.5}
# The least duration of timing of what is probed once more, and of options of the allocator that
# are to be told apart.
FINALIST_SECONDS = 3.0
MEASURE_SECONDS = 10.0  # of timing, at most
# What a profile leaves in its folder, and how it names the phases of a step in the trace.
TRACE_FILE, OPERATIONS_FILE = "trace.json.gz", "operations.json"
PROFILE_MARK = "planner: "


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ProfileOrder(Message):
    """What a probe is to do under torch's profiler after its timed steps: so many optimizer steps,
    whose files go to `folder`."""

    folder: str
    steps: Annotated[int, Field(ge=1, le=100)] = 3


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

    `capability` is the GPU's, where it is known: so that nobody need touch the device to ask it.
    """

    probe_id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    device: Annotated[str, Field(pattern=r"^(cpu|cuda:\d+)$")] = "cpu"
    seed: int = 0
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
    record_phases: bool = False
    profile: ProfileOrder | None = None
    capability: tuple[int, int] | None = None

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
    """The one line a worker reads. `deadline_seconds` is what is left when it is sent; a rank of a
    world has its `place`, and stays until its channel of requests is closed."""

    format: Literal[1] = 1
    request: ProbeRequest
    deadline_seconds: float
    place: RankPlace | None = None


class AnswerMessage(Message):
    format: Literal[1] = 1
    probe_id: str


class PhaseMessage(AnswerMessage):
    """The worker has entered `phase`: import, build, compile, forward, backward, measure …"""

    type: Literal["phase"] = "phase"
    phase: str


class ProgressMessage(AnswerMessage):
    """`num_steps` optimizer steps were timed so far, at a median of `step_seconds`."""

    type: Literal["progress"] = "progress"
    num_steps: int
    step_seconds: float


class OutcomeMessage(AnswerMessage):
    """How a training ended, in which phase, in the fields of a `MeasurementRecord`: a worker's last
    word. `lost_others` is a failure because other ranks of its world are gone, who know why.

    What only ranks of a world tell: `forward_seconds` as in a `RankRecord`; `world` as this rank
    saw it. `ranks` is what the tuner puts together of them.
    """

    type: Literal["outcome"] = "outcome"
    status: ProbeStatus
    phase: str = ""
    lost_others: bool = False
    message: str = ""
    flags: tuple[str, ...] = ()
    step_seconds: tuple[Seconds, ...] = ()
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_bytes: int | None = None
    phases: PhaseBytes | None = None
    unit: str | None = None
    compile_seconds: float | None = None
    clocks: Clocks | None = None
    free_bytes: int | None = None
    taken_bytes: int | None = None
    forward_seconds: float | None = None
    world: WorldInfo | None = None
    ranks: tuple[RankRecord, ...] = ()


ProbeAnswer = PhaseMessage | ProgressMessage | OutcomeMessage
PROBE_ANSWERS: TypeAdapter[ProbeAnswer] = TypeAdapter(
    Annotated[ProbeAnswer, Field(discriminator="type")]
)


def encode(message: BaseModel) -> bytes:
    """One message as bytes. It begins a line of its own, so that foreign bytes before it on the
    channel do not spoil it."""
    return b"\n" + message.model_dump_json().encode() + b"\n"


def send(channel: int, data: bytes) -> None:
    """All of `data`, however little a pipe takes at a time."""
    while data:
        data = data[os.write(channel, data) :]


class AnswerReader:
    """Bytes of the result channel in, answers of one probe out; what is not one is counted. Holds
    at most `MAX_MESSAGE_BYTES`, however much is sent.
    """

    def __init__(self, probe_id: str) -> None:
        self.probe_id = probe_id
        self.num_garbage = 0
        self._line = bytearray()
        self._overlong = False

    def feed(self, data: bytes) -> list[Any]:
        """The answers that `data` completes, in order."""
        *lines, rest = data.split(b"\n")
        answers = []
        for line in lines:
            self._append(line)
            answer = self._take_line()
            if answer is not None:
                answers.append(answer)
        self._append(rest)
        return answers

    def close(self) -> None:
        """The channel has ended: a line without its end is a truncated message, so garbage."""
        if self._line or self._overlong:
            self.num_garbage += 1
        self._line.clear()

    def _append(self, piece: bytes) -> None:
        if len(self._line) + len(piece) > MAX_MESSAGE_BYTES:
            self._overlong = True
            self._line.clear()
        if not self._overlong:
            self._line += piece

    def _take_line(self) -> AnswerMessage | None:
        line, overlong = bytes(self._line), self._overlong
        self._line.clear()
        self._overlong = False
        if not line and not overlong:
            return None
        try:
            answer: AnswerMessage | None = None if overlong else PROBE_ANSWERS.validate_json(line)
        except ValidationError:
            answer = None
        if answer is None or answer.probe_id != self.probe_id:
            self.num_garbage += 1
            return None
        return answer


class Report:
    """Tells the parent where the worker is, and what it has found."""

    def __init__(self, result_fd: int, probe_id: str) -> None:
        self.result_fd = result_fd
        self.probe_id = probe_id
        self.phase = ""

    def say(self, message: AnswerMessage) -> None:
        send(self.result_fd, encode(message))

    def enter(self, phase: str) -> None:
        """Report that `phase` begins, if it is another than before."""
        if phase != self.phase:
            self.phase = phase
            self.say(PhaseMessage(probe_id=self.probe_id, phase=phase))

    def progress(self, num_steps: int, step_seconds: float) -> None:
        self.say(
            ProgressMessage(probe_id=self.probe_id, num_steps=num_steps, step_seconds=step_seconds)
        )
