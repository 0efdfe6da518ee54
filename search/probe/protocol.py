"""The messages between the tuner and the workers of a probe, in JSON: a worker receives a
`WorkOrder`, and answers with progress and one outcome. Then how the tuner judges a worker that
ended without an outcome; `planner.core.failures` knows what errors mean.
"""

import os
import signal
import uuid
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from planner.core.failures import is_allocation_failure
from planner.core.schema import MeasurementRecord, Model, ProbeStatus, TrainSetting
from planner.core.schema.record import Clocks, RankRecord, Seconds, WorldInfo
from planner.machine.host import text_of

# A GPU's clocks rise when work comes and fall as it gets warm. On an NVIDIA H200 (torch 2.11.0,
# 2026-11-26) the first half second of steps was 0.3% slower than 30 s of them; of a card that gets
# hot in seconds nothing was measured.
CUDA_SECONDS = {"warmup_seconds": 0.5, "min_measure_seconds": 1.0, "give_up_seconds": 0.5}
# The least time over which a setting is timed that is probed once more.
REPEAT_SECONDS = 3.0
MEASURE_SECONDS = 10.0  # steps are timed for at most so long


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ProbeRequest(Message):
    """What to probe and how long. Bytes are integers, times are seconds; `device` is "cpu" or
    "cuda:N".

    - Warm-up: `warmup_steps` optimizer steps, and steps for `warmup_seconds`.
    - Timing ends, after `min_steps` and `min_measure_seconds`, as soon as the median is known to
      ±`median_precision` (95%) or there are `max_steps`, and always after `max_measure_seconds`. It
      ends earlier if after `give_up_seconds` the highest likely rate is under
      `give_up_images_per_second`.
    - `memory_cap_bytes` emulates a smaller device: on CUDA the caching allocator gets what is left
      beside the context; on the CPU it limits the growth of the worker's own memory.

    Seconds of warm-up, of timing at least and of giving up that are not set are `CUDA_SECONDS` on a
    GPU, and 0 on the CPU.
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


class RankPlace(Message):
    """Which rank of a world a worker is. Ranks find each other by the file `store`, which all of
    them open. Each has `threads` of the CPU (None: as torch chooses)."""

    rank: Annotated[int, Field(ge=0)]
    store: str
    threads: Annotated[int, Field(ge=1)] | None = None


class WorkOrder(Message):
    """A worker's order. `deadline` is an instant of `time.monotonic`, which is one clock for all
    processes of a machine; a rank of a world has its `place`."""

    request: ProbeRequest
    deadline: float
    place: RankPlace | None = None


def backend_of(device: str) -> Literal["gloo", "nccl"]:
    """The backend of torch.distributed for ranks on a device."""
    return "gloo" if device == "cpu" else "nccl"


class ProgressMessage(Message):
    """The phase that a worker is in: import, device, join, build, compile, forward, backward,
    optimizer, zero_grad, warm-up, measure or check; a probe's own are start and end. In measure
    `num_steps` optimizer steps were timed so far, at a median of `step_seconds`."""

    type: Literal["progress"] = "progress"
    rank: int = 0
    phase: str
    num_steps: int = 0
    step_seconds: float | None = None


class OutcomeMessage(Message):
    """A worker's last message: how its training ended and in which phase, in the fields of a
    `MeasurementRecord`. `lost_others`: it failed because other ranks are gone, which know why. The
    tuner makes `world` and `ranks` from the outcomes of several ranks."""

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
    """Sends the tuner a worker's messages, one at a time."""

    def __init__(self, channel: int, rank: int = 0) -> None:
        self.channel, self.rank = channel, rank
        self.phase = ""

    def send(self, message: Answer) -> None:
        stamped = message.model_copy(update={"rank": self.rank})
        os.write(self.channel, stamped.model_dump_json().encode())

    def enter(self, phase: str) -> None:
        """Reports that `phase` begins, if the worker was in another."""
        if phase != self.phase:
            self.phase = phase
            self.send(ProgressMessage(phase=phase))


CONTRACT = "contract"  # the phase of a probe whose step is not what its task says
_FATAL_LINES = 6  # of a fatal signal's stack, whose innermost frames come first
_LAST_LINES = 5
_MESSAGE_CHARACTERS = 1500
_FIRST_LINE_CHARACTERS = 500


def cut_message(text: str) -> str:
    """A long text cut to its first line, which names the error, and its end, which says where."""
    if len(text) <= _MESSAGE_CHARACTERS:
        return text
    first = text.split("\n", 1)[0][:_FIRST_LINE_CHARACTERS]
    return f"{first}\n…\n{text[len(first) + 3 - _MESSAGE_CHARACTERS :]}"


def broke_contract(record: MeasurementRecord) -> bool:
    """Whether the model or its task must change for a probe to end well, rather than the
    setting."""
    return record.status == "unsupported" and record.phase == CONTRACT


def last_words(stderr: str) -> str:
    """The lines of a dead worker's standard error that say why it died, newest last, shortened. The
    C++ runtime names an exception that nobody caught before the "Fatal Python error", with a
    backtrace between the two."""
    lines = [line.rstrip() for line in stderr.splitlines() if line.strip()]
    fatal = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error")]
    first = fatal[-1] if fatal else max(0, len(lines) - _LAST_LINES)
    uncaught = [i for i, line in enumerate(lines[:first]) if line.startswith("terminate called")]
    kept = lines[uncaught[-1] : min(uncaught[-1] + 2, first)] if uncaught else []
    return cut_message("\n".join([*kept, *lines[first : first + _FATAL_LINES]]))


def describe_exit(wait_status: int) -> str:
    """`exit status 3`, or `SIGSEGV (Segmentation fault)`."""
    if os.WIFSIGNALED(wait_status):
        number = os.WTERMSIG(wait_status)
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        return f"{name} ({signal.strsignal(number) or 'unknown'})"
    return f"exit status {os.waitstatus_to_exitcode(wait_status)}"


def judge_death(
    wait_status: int, words: str, kills_before: int | None
) -> tuple[Literal["out_of_memory", "crashed"], str]:
    """The status and the message of a worker that ended without an outcome: from its wait status,
    the last words of its standard error, and the number of processes that the kernel had killed
    before."""
    ended = describe_exit(wait_status)
    if is_allocation_failure(words):
        return "out_of_memory", f"{ended}\n{words}"
    killed = os.WIFSIGNALED(wait_status) and os.WTERMSIG(wait_status) == signal.SIGKILL
    kills = count_kernel_kills()
    # It was the kernel's if that has counted one more, or counts none: nothing else is as likely.
    if killed and (kills is None or kills_before is None or kills > kills_before):
        return "out_of_memory", "the kernel killed it: the machine is out of memory"
    return "crashed", f"{ended}\n{words}".strip()


def count_kernel_kills() -> int | None:
    """How many processes the kernel has killed for memory since boot; None where it keeps no
    count."""
    lines = text_of(Path("/proc/vmstat")).splitlines()
    counts = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
    return int(counts[0]) if counts else None
