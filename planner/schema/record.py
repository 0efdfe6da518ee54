"""A measurement record: one probe of one setting on one device, as one JSON line."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from planner.schema.any_model import Model
from planner.schema.expected import Expected
from planner.schema.setting import TrainSetting
from planner.schema.world import RankRecord, WorldInfo
from planner.units import MIB

RECORD_FORMAT = 1
# The flag of a probe that was ended for no fault of its setting.
BUDGET_ENDED = "cut short: the budget ended"

# Every model here builds its validator when it is first used: reading a record is not on the way of
# an estimate, which must answer at once.

ProbeStatus = Literal[
    "measured", "out_of_memory", "timed_out", "crashed", "unsupported", "non_finite"
]


# How far two readings of one device's memory may lie apart: NVML's total less its reserve and
# CUDA's total differ by up to 1.3%, and the reserve by what ECC takes.
SAME_MEMORY_SHARE = 0.02
# What others may hold of a device without a word: an idle GPU's driver keeps a few MiB, a process
# that computes at least its context of some hundred.
NOTEWORTHY_SHARE, NOTEWORTHY_BYTES = 0.01, 256 * MIB


class DeviceInfo(BaseModel):
    """The device a probe ran on. `memory_cap_bytes` is set where a smaller card was emulated;
    `uuid` is the driver's name of this very card."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    kind: Literal["cuda", "cpu"]
    name: str
    total_bytes: int
    capability: tuple[int, int] | None = None
    driver: str | None = None
    memory_cap_bytes: int | None = None
    uuid: str | None = None

    def is_like(self, other: DeviceInfo) -> bool:
        """Whether a probe on `other` stands for one on this: the same kind of card, its memory read
        to within 2%, and no figure (driver, capability) that both know and that differs."""
        return (
            (self.kind, self.name) == (other.kind, other.name)
            and self.memory_cap_bytes == other.memory_cap_bytes
            and _is_near(self.total_bytes, other.total_bytes)
            and _may_equal(self.driver, other.driver)
            and _may_equal(self.capability, other.capability)
        )


def noteworthy_bytes(total_bytes: int) -> int:
    """From how much on, in bytes, what others hold of a device is worth a word: 1% of it, and
    256 MiB at most."""
    return min(int(NOTEWORTHY_SHARE * total_bytes), NOTEWORTHY_BYTES)


def _is_near(a: int, b: int) -> bool:
    return abs(a - b) <= SAME_MEMORY_SHARE * max(a, b)


def _may_equal(a: object, b: object) -> bool:
    return a is None or b is None or a == b


class PhaseBytes(BaseModel):
    """Live bytes (`torch.cuda.memory_allocated`) at the end of each phase of a steady step."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    before_step: int
    after_forward: int
    after_backward: int
    after_step: int


class Spread(BaseModel):
    """Of several readings of one figure: the least, the median and the most."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    least: float
    median: float
    most: float


class Clocks(BaseModel):
    """Device clocks in MHz while the steps were timed, and what held them back.

    The plain figures are those of the last of `num_readings` readings, a second apart; a spread is
    over all of them. `busy_percent` is nvidia-smi's utilisation: the share of the time in which
    some kernel ran, however little of the card it used; `memory_busy_percent` that in which memory
    was read or written.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    sm_mhz: int | None = None
    sm_max_mhz: int | None = None
    memory_mhz: int | None = None
    temperature_c: int | None = None
    power_watts: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    num_readings: int = 0
    busy_percent: Spread | None = None
    memory_busy_percent: Spread | None = None
    sm_mhz_spread: Spread | None = None
    power_watts_spread: Spread | None = None


# Of something that happened: a clock that says 0, less, infinity or no number says nothing.
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class MeasurementRecord(BaseModel):
    """What one probe found. Bytes are integers, times are seconds, `date` is ISO 8601 in UTC.

    `step_seconds` holds one sample per whole optimizer step, after warm-up, from the second step
    on; `images_per_second` is images of one optimizer step on this device over their median.
    On the CPU `peak_allocated_bytes` is the growth of the worker's peak resident set.
    Of a probe over several ranks (`world`) each step is as long as on its slowest rank, each peak
    that of the fullest, and `ranks` has them one by one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    format: int = RECORD_FORMAT
    probe_id: str = Field(default="", description="unique; one probe is counted once by it")
    model: Model
    setting: TrainSetting
    device: DeviceInfo
    versions: dict[str, str]
    date: str
    status: ProbeStatus
    message: str = Field(default="", description="why, where the status is not `measured`")
    phase: str = Field(default="", description="where it ended: forward, backward, optimizer …")
    step_seconds: tuple[Seconds, ...] = ()
    images_per_second: float | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_bytes: int | None = None
    phases: PhaseBytes | None = None
    unit: str | None = Field(
        default=None, description="what a task calls an item of its batch; None: not a task's"
    )
    compile_seconds: float | None = None
    probe_seconds: float = 0.0
    clocks: Clocks | None = None
    flags: tuple[str, ...] = Field(default=(), description="what may have disturbed the samples")
    free_bytes: int | None = Field(default=None, description="of the GPU, when the probe began")
    taken_bytes: int | None = Field(
        default=None, description="by other processes from then to the end, or to the failure"
    )
    allowed_bytes: int | None = Field(
        default=None, description="what a setting may take in the search that asked for it"
    )
    expected: Expected | None = Field(
        default=None, description="what the search that asked for it believed it would find"
    )
    world: WorldInfo | None = Field(default=None, description="None: one process on one device")
    ranks: tuple[RankRecord, ...] = ()

    @property
    def used_bytes(self) -> int | None:
        """What the probe took of the device: its whole process on a GPU, the growth of its RSS on a
        CPU. None where nothing is known.

        Each figure is a lower bound, so the largest counts: a driver may not see all of a process.
        A figure of 0 or less is one that nobody has.
        """
        figures = (self.device_bytes, self.peak_reserved_bytes, self.peak_allocated_bytes)
        return max((n for n in figures if n is not None and n > 0), default=None)

    @property
    def world_images_per_second(self) -> float | None:
        """Images of all devices together."""
        rate = self.images_per_second
        return None if rate is None else rate * self.setting.world_size

    @property
    def samples(self) -> tuple[float, ...]:
        """What its rate is the median of, in seconds."""
        return self.step_seconds

    def with_samples(self, samples: tuple[float, ...]) -> Self:
        return self.model_copy(update={"step_seconds": samples})

    @property
    def cut_short(self) -> bool:
        """Whether the budget ended it: then it says a probe's cost, and nothing of its setting."""
        return BUDGET_ENDED in self.flags

    @property
    def inconclusive(self) -> bool:
        """Whether it ended for no fault of its setting, and so says nothing of it: cut short by the
        budget, or out of memory or of time while others held or took what it was allowed."""
        return self.cut_short or (
            self.status in ("out_of_memory", "timed_out") and self.was_crowded
        )

    @property
    def was_crowded(self) -> bool:
        """Whether other processes left it less memory than it was allowed, or came while it ran and
        took a share that is worth a word."""
        slack = noteworthy_bytes(self.device.total_bytes)
        taken = max(self.taken_bytes or 0, 0)
        if self.free_bytes is None or self.allowed_bytes is None:
            return taken > slack
        left = self.free_bytes - taken
        return left + slack < self.allowed_bytes or (self.status == "timed_out" and taken > slack)

    def judged_in(self, allowed_bytes: int | None) -> Self:
        """The same record, held against the memory that a search allows now."""
        return self.model_copy(update={"allowed_bytes": allowed_bytes})
