"""What was measured: the record of a probe of one setting on one device, a line of JSON; loaders of
data; and the recommendation of a search, `recommendation.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, JsonValue

from planner.core.schema.model import Model, unit_of
from planner.core.schema.setting import TrainSetting
from planner.core.schema.validation import RECORD_CONFIG, UNIT, Int64
from planner.core.units import MIB

Range = tuple[float, float, float]


class Expected(BaseModel):
    """What a search expected of a probe when it chose it.

    Figures are (low, middle, high): the measurement is as likely above the middle as below it, and
    with 95% between low and high. `used_bytes` is compared with the record's property of that name.
    `basis` is "prior" before the search has learned from a probe, then "probes". `fits` is the
    probability of staying within the memory that the search allows; None without a limit.
    """

    model_config = RECORD_CONFIG

    stage: str
    basis: Literal["prior", "probes"]
    images_per_second: Range | None = None
    used_bytes: Range | None = None
    fits: float | None = None


class WorldInfo(BaseModel):
    """The ranks of one probe: `world_size` in all, as many on each of `nodes`. `backend` carried
    the gradients."""

    model_config = RECORD_CONFIG

    world_size: Int64
    nodes: Int64 = 1
    backend: Literal["gloo", "nccl"]


class RankRecord(BaseModel):
    """What one rank measured: the median of its own steps, and its own peaks in bytes. Ranks wait
    for each other in every step, so their steps take the same time."""

    model_config = RECORD_CONFIG

    rank: Int64
    device: str
    step_seconds: float
    peak_allocated_bytes: Int64 | None = None
    peak_reserved_bytes: Int64 | None = None
    device_bytes: Int64 | None = None


RECORD_FORMAT = 1
# The flag of a probe that was ended, though not because of its setting.
BUDGET_ENDED = "cut short: the budget ended"

Phase = Literal["build", "forward", "backward", "optimizer", "zero_grad"]  # of a training step
ProbeStatus = Literal[
    "measured", "out_of_memory", "timed_out", "crashed", "unsupported", "non_finite"
]


# The share by which two readings of one device's memory may differ: NVML's total less its reserve
# and CUDA's total differ by up to 1.3%, and the reserve by what ECC takes.
SAME_MEMORY_SHARE = 0.02
# What others may hold of a device without a note: an idle GPU's driver keeps a few MiB, a process
# that computes at least its context of some hundred.
NOTEWORTHY_SHARE, NOTEWORTHY_BYTES = 0.01, 256 * MIB


class DeviceInfo(BaseModel):
    """The device a probe ran on. `memory_cap_bytes` is set where a larger card stood for a smaller
    one; `uuid` is the driver's name of this very card. `emulated`: torch's own CUDA code ran on no
    GPU (`planner.machine.emulated`), so that the bytes are torch's, and the times mean nothing."""

    model_config = RECORD_CONFIG

    kind: Literal["cuda", "cpu"]
    name: str
    total_bytes: Int64
    capability: tuple[int, int] | None = None
    driver: str | None = None
    memory_cap_bytes: Int64 | None = None
    uuid: str | None = None
    emulated: bool = False

    @property
    def title(self) -> str:
        """The device's name for people, who must not take an emulated one's rates for a card's."""
        return f"an emulated {self.name}" if self.emulated else self.name

    def is_like(self, other: DeviceInfo) -> bool:
        """Whether a probe on `other` stands for one on this device: the same kind of card, memory
        within 2%, and no difference in driver or capability where both are known."""
        return (
            (self.kind, self.name, self.emulated) == (other.kind, other.name, other.emulated)
            and self.memory_cap_bytes == other.memory_cap_bytes
            and _is_near(self.total_bytes, other.total_bytes)
            and _may_equal(self.driver, other.driver)
            and _may_equal(self.capability, other.capability)
        )


def noteworthy_bytes(total_bytes: int) -> int:
    """The bytes that others may hold of a device without a note: 1% of it, and 256 MiB at most."""
    return min(int(NOTEWORTHY_SHARE * total_bytes), NOTEWORTHY_BYTES)


def _is_near(a: int, b: int) -> bool:
    return abs(a - b) <= SAME_MEMORY_SHARE * max(a, b)


def _may_equal(a: object, b: object) -> bool:
    return a is None or b is None or a == b


class Spread(BaseModel):
    """The least, the median and the most of several readings of one figure."""

    model_config = RECORD_CONFIG

    least: float
    median: float
    most: float


class Clocks(BaseModel):
    """Device clocks in MHz while the steps were timed, and what held them back.

    There were `num_readings` readings, a second apart; single figures are the last one's, a spread
    is over all. `busy_percent` is nvidia-smi's utilisation: the share of the time in which some
    kernel ran, however little of the card it used; `memory_busy_percent` the share in which memory
    was read or written.
    """

    model_config = RECORD_CONFIG

    sm_mhz: Int64 | None = None
    sm_max_mhz: Int64 | None = None
    memory_mhz: Int64 | None = None
    temperature_c: Int64 | None = None
    power_watts: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    num_readings: Int64 = 0
    busy_percent: Spread | None = None
    memory_busy_percent: Spread | None = None
    sm_mhz_spread: Spread | None = None
    power_watts_spread: Spread | None = None


# The time of something that happened is above 0 and finite.
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class MeasurementRecord(BaseModel):
    """What one probe found. Bytes are integers, times are seconds, `date` is ISO 8601 in UTC.

    `step_seconds` has a sample for each whole optimizer step after warm-up, from the second step
    on; `images_per_second` is the images of a step on this device over their median. On the CPU
    `peak_allocated_bytes` is the growth of the worker's peak resident set. Over several ranks
    (`world`) each step is as long as on the slowest rank, each peak is the highest of all ranks,
    and `ranks` has them one by one.
    """

    model_config = RECORD_CONFIG

    format: Int64 = RECORD_FORMAT
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
    peak_allocated_bytes: Int64 | None = None
    peak_reserved_bytes: Int64 | None = None
    device_bytes: Int64 | None = None
    phases: dict[str, Int64] | None = Field(
        default=None, description="of older records: live bytes at the end of each"
    )
    unit: str | None = Field(None, pattern=UNIT, description="a task's word for an item of a batch")
    compile_seconds: float | None = None
    probe_seconds: float = 0.0
    clocks: Clocks | None = None
    flags: tuple[str, ...] = Field(default=(), description="what may have disturbed the samples")
    free_bytes: Int64 | None = Field(default=None, description="of the GPU, when the probe began")
    taken_bytes: Int64 | None = Field(
        default=None, description="by other processes from then to the end, or to the failure"
    )
    allowed_bytes: Int64 | None = Field(
        default=None, description="what a setting may take in the search that asked for it"
    )
    expected: Expected | None = Field(
        default=None, description="what the search that asked for it believed it would find"
    )
    world: WorldInfo | None = Field(default=None, description="None: one process on one device")
    ranks: tuple[RankRecord, ...] = ()

    @property
    def counts(self) -> str:
        """What the items of the batch are called."""
        return self.unit or unit_of(self.model)

    @property
    def used_bytes(self) -> int | None:
        """The bytes that the probe took of the device: those of its whole process on a GPU, the
        growth of its resident set on a CPU. None where nothing is known.

        A driver may not see all of a process, so that each figure is a lower bound, and the largest
        counts. A figure of 0 or less is no reading.
        """
        figures = (self.device_bytes, self.peak_reserved_bytes, self.peak_allocated_bytes)
        return max((n for n in figures if n is not None and n > 0), default=None)

    @property
    def world_images_per_second(self) -> float | None:
        """Images per second of all devices together."""
        rate = self.images_per_second
        return None if rate is None else rate * self.setting.world_size

    @property
    def cut_short(self) -> bool:
        """Whether the budget ended the probe: then it tells what a probe costs, and nothing of its
        setting."""
        return BUDGET_ENDED in self.flags

    @property
    def inconclusive(self) -> bool:
        """Whether the probe ended, though not because of its setting, and so tells nothing of it:
        cut short by the budget, out of memory or time while others held or took what it was
        allowed, or on a device that does not answer."""
        return (
            self.cut_short
            or self.lost_device
            or (self.status in ("out_of_memory", "timed_out") and self.was_crowded)
        )

    @property
    def lost_device(self) -> bool:
        """Whether the device failed before anything of the setting was on it: it fell off the bus,
        or waits to be reset."""
        return self.status == "crashed" and self.phase == "device"

    @property
    def was_crowded(self) -> bool:
        """Whether other processes left the probe less memory than it was allowed, or took a share
        worth a note while it ran."""
        slack = noteworthy_bytes(self.device.total_bytes)
        taken = max(self.taken_bytes or 0, 0)
        if self.free_bytes is None or self.allowed_bytes is None:
            return taken > slack
        left = self.free_bytes - taken
        return left + slack < self.allowed_bytes or (self.status == "timed_out" and taken > slack)

    def judged_in(self, allowed_bytes: int | None) -> Self:
        """The same record, judged by the memory that a search allows now."""
        return self.model_copy(update={"allowed_bytes": allowed_bytes})


# How training data are loaded: a `DataLoader`'s setting, and what was measured of it.

Pipeline = Literal["torchvision", "timm", "own"]
"""What makes a tensor of a picture: torchvision's or timm's transforms, or a Dataset by itself."""

LoaderBound = Literal["processors", "disk", "main process"]
"""What bounds loading. The `main process` has work for every batch that no worker can do."""

MAX_WORKERS = 1024


class LoaderSetting(BaseModel):
    """One way to load: the arguments of `torch.utils.data.DataLoader` and what runs in it. With 0
    `workers` the training process loads by itself and prefetches nothing. `batch_size` is the
    micro-batch."""

    model_config = RECORD_CONFIG

    pipeline: Pipeline = "torchvision"
    batch_size: Annotated[int, Field(ge=1)] = 64
    workers: Annotated[int, Field(ge=0, le=MAX_WORKERS)] = 8
    prefetch_factor: Annotated[int, Field(ge=1)] = 2
    pin_memory: bool = True

    @property
    def persistent_workers(self) -> bool:
        """Whether workers go on into the next epoch: wherever there are any."""
        return self.workers > 0

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `DataLoader`, which takes no prefetch_factor without workers."""
        prefetch = {"prefetch_factor": self.prefetch_factor} if self.workers else {}
        return {
            "batch_size": self.batch_size, "num_workers": self.workers, **prefetch,
            "pin_memory": self.pin_memory, "persistent_workers": self.persistent_workers,
        }  # fmt: skip

    @property
    def title(self) -> str:
        """The setting in words: `torchvision, 8 workers, prefetch 2, pinned`."""
        number = f"{self.workers} worker{'s' if self.workers > 1 else ''}"
        loads = f"{number}, prefetch {self.prefetch_factor}" if self.workers else "no workers"
        return f"{self.pipeline}, {loads}{', pinned' if self.pin_memory else ''}"


class LoaderRun(BaseModel):
    """One loader measured by itself, in a steady state. `cpu_seconds` are those of all its
    processes for one image; its start took `first_batch_seconds`."""

    model_config = RECORD_CONFIG

    setting: LoaderSetting
    images_per_second: float = Field(gt=0)
    cpu_seconds: float
    first_batch_seconds: float


class DataResult(BaseModel):
    """What `planner data` found for the data at `location`, a folder or MODULE:FACTORY. `setting`
    is the fastest of `runs`; `disk_share` is the share of the bytes that the page cache did not
    hold.
    """

    model_config = RECORD_CONFIG

    location: str
    num_items: Int64 | None = None
    num_classes: Int64 | None = None
    image_size: tuple[Int64, Int64]
    processors: float = Field(description="that a process could keep busy on that machine")
    setting: LoaderSetting
    images_per_second: float = Field(gt=0)
    bound: LoaderBound
    runs: tuple[LoaderRun, ...]
    disk_share: float | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    date: str = ""
    notes: tuple[str, ...] = ()

    @property
    def is_factory(self) -> bool:
        """Whether the Dataset is the user's own."""
        return self.setting.pipeline == "own"


class Feeding(BaseModel):
    """What a recommendation says of its data: the loader, and a training by the emitted script.
    `images_per_second` and `waited` (the share of the time in which the device waited for batches)
    are None where the script did not run to its end; then a note says why."""

    model_config = RECORD_CONFIG

    data: DataResult
    steps: Int64 = 0
    images_per_second: float | None = None
    waited: float | None = None
    notes: tuple[str, ...] = ()


# What a Swin's authors do to pictures, with which loaders are measured and trainers train: from
# microsoft/Swin-Transformer @f82860b, config.py, with each figure's key beside it.


@dataclass(frozen=True)
class Augmentation:
    """What is done to a training picture besides crop and flip, and how pictures are resized."""

    auto_augment: str = "rand-m9-mstd0.5-inc1"  # AUG.AUTO_AUGMENT, in timm's words
    color_jitter: float = 0.4  # AUG.COLOR_JITTER, which timm omits beside an auto_augment
    erasing: float = 0.25  # AUG.REPROB, of AUG.REMODE pixel and AUG.RECOUNT 1
    interpolation: str = "bicubic"  # DATA.INTERPOLATION
    crop_share: float = 0.875  # TEST.CROP: resized to 256/224, cropped at the centre (build.py)


RESULT_FORMAT = 1


class Recommendation(BaseModel):
    """What `planner tune` found. `setting` was run: `evidence` is its own measurement.

    `status` is "recommended", or "nothing_fits" where no probe fit, or none was made; then
    `setting` and `evidence` are None, and `advice` says why and what next. `baseline` is the plain
    default (fp32, eager, no checkpointing, at the fastest batch that was measured) where it was
    measured; `gain` is the recommendation's rate over the baseline's.
    """

    model_config = RECORD_CONFIG

    format: Int64 = RESULT_FORMAT
    status: Literal["recommended", "nothing_fits"]
    model: Model
    device: DeviceInfo
    versions: dict[str, str]
    date: str
    setting: TrainSetting | None
    evidence: MeasurementRecord | None
    runners_up: tuple[MeasurementRecord, ...] = ()
    baseline: MeasurementRecord | None = None
    gain: float | None = None
    num_probes: Int64 = 0
    num_candidates: Int64 = 0
    stopped_because: str = ""
    notes: tuple[str, ...] = Field(default=(), description="said to the person, one line each")
    advice: str = ""
    feeding: Feeding | None = Field(default=None, description="where the data were measured too")
    asked: dict[str, JsonValue] | None = Field(
        default=None,
        description="the search's options that are not the defaults, as keywords of `search.tune`",
    )
