"""What crosses between the tuner and the workers of a probe, in JSON: each is given a `WorkOrder`,
and answers with progress and one outcome; and how an end without an outcome is judged and told.
What errors say is known to `planner.core.failures`.
"""

import os
import signal
import uuid
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    model_validator,
)

from planner.core.failures import is_allocation_failure
from planner.core.schema import MeasurementRecord, Model, ProbeStatus, TrainSetting
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


CONTRACT = "contract"  # the phase of a probe that ended since a step is not what its task says
# Frames of a fatal signal that are worth keeping: the innermost ones come first.
_FATAL_LINES = 6
_LAST_LINES = 5
_MESSAGE_CHARACTERS = 1500
_FIRST_LINE_CHARACTERS = 500


def shorten(text: str) -> str:
    """A long text by its first line, which names the error, and its end, which says where."""
    if len(text) <= _MESSAGE_CHARACTERS:
        return text
    first = text.split("\n", 1)[0][:_FIRST_LINE_CHARACTERS]
    return f"{first}\n…\n{text[len(first) + 3 - _MESSAGE_CHARACTERS :]}"


def broke_contract(record: MeasurementRecord) -> bool:
    """Whether the model or its task must change for a probe to end well, and not the setting."""
    return record.status == "unsupported" and getattr(record, "phase", "") == CONTRACT


def last_words(stderr: str) -> str:
    """The lines of a dead worker's standard error that say why, newest last, shortened.

    What the C++ runtime says of an exception that nobody caught stands before the "Fatal Python
    error", and its backtrace between the two.
    """
    lines = [line.rstrip() for line in stderr.splitlines() if line.strip()]
    fatal = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error")]
    first = fatal[-1] if fatal else max(0, len(lines) - _LAST_LINES)
    uncaught = [i for i, line in enumerate(lines[:first]) if line.startswith("terminate called")]
    kept = lines[uncaught[-1] : min(uncaught[-1] + 2, first)] if uncaught else []
    return shorten("\n".join([*kept, *lines[first : first + _FATAL_LINES]]))


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
    """What became of a worker that ended without an answer, and its message: from its status, the
    last words of its standard error, and how many processes the kernel had killed before."""
    said = describe_exit(wait_status)
    if is_allocation_failure(words):
        return "out_of_memory", f"{said}\n{words}"
    killed = os.WIFSIGNALED(wait_status) and os.WTERMSIG(wait_status) == signal.SIGKILL
    if killed and kernel_ran_out(kills_before):
        return "out_of_memory", "the kernel killed it: the machine is out of memory"
    return "crashed", f"{said}\n{words}".strip()


def count_kernel_kills() -> int | None:
    """How many processes the kernel has killed for memory since boot; None where it is not told."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    counts = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
    return int(counts[0]) if counts else None


def kernel_ran_out(kills_before: int | None) -> bool:
    """Whether a SIGKILL that was not ours was the kernel's: its count of such kills has risen.

    Where the kernel keeps no count, memory is by far the likeliest reason.
    """
    kills = count_kernel_kills()
    return kills is None or kills_before is None or kills > kills_before
