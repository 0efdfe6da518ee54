"""A measurement record: one probe of one setting on one device, as one JSON line; what was measured
of loading data; and the file that holds some: `recommendation.json` of a search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, JsonValue

from planner.core.schema.model import Model, unit_of
from planner.core.schema.setting import TrainSetting
from planner.core.schema.validation import KEPT, UNIT, Whole
from planner.core.units import MIB

Range = tuple[float, float, float]


class Expected(BaseModel):
    """What a search believed that a probe would find, at the moment it chose it.

    Figures are (low, middle, high): as likely above the middle as below it, and with 95% between
    low and high, the noise of a measurement included. `used_bytes` is held against the record's
    property of that name. `basis` is "prior" where no probe had taught the search anything yet,
    else "probes". `fits` is the probability of staying within the memory that the search allows;
    None where it has no limit.
    """

    model_config = KEPT

    phase: str
    basis: Literal["prior", "probes"]
    images_per_second: Range | None = None
    used_bytes: Range | None = None
    fits: float | None = None


class WorldInfo(BaseModel):
    """The ranks of one probe: `world_size` in all, as many on each of `nodes`. `backend` carried
    the gradients."""

    model_config = KEPT

    world_size: Whole
    nodes: Whole = 1
    backend: Literal["gloo", "nccl"]


class RankRecord(BaseModel):
    """What one rank measured: the median of its own steps, and its own peaks in bytes. Ranks wait
    for each other in every step, so their steps take the same time."""

    model_config = KEPT

    rank: Whole
    device: str
    step_seconds: float
    peak_allocated_bytes: Whole | None = None
    peak_reserved_bytes: Whole | None = None
    device_bytes: Whole | None = None


RECORD_FORMAT = 1
# The flag of a probe that was ended for no fault of its setting.
BUDGET_ENDED = "cut short: the budget ended"

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
    """The device a probe ran on. `memory_cap_bytes` is set where a smaller card was played by a
    larger one; `uuid` is the driver's name of this very card. Where it is `emulated`, torch's own
    CUDA code ran on no GPU (`planner.machine.emulated`): bytes are torch's, and times nobody's."""

    model_config = KEPT

    kind: Literal["cuda", "cpu"]
    name: str
    total_bytes: Whole
    capability: tuple[int, int] | None = None
    driver: str | None = None
    memory_cap_bytes: Whole | None = None
    uuid: str | None = None
    emulated: bool = False

    @property
    def title(self) -> str:
        """Its name for people, who shall not take an emulated one's rates for a card's."""
        return f"an emulated {self.name}" if self.emulated else self.name

    def is_like(self, other: DeviceInfo) -> bool:
        """Whether a probe on `other` stands for one on this: the same kind of card, its memory read
        to within 2%, and no figure (driver, capability) that both know and that differs."""
        return (
            (self.kind, self.name, self.emulated) == (other.kind, other.name, other.emulated)
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
    """Live bytes (`torch.cuda.memory_allocated`) at the end of each phase of a steady step: older
    records have them."""

    model_config = KEPT

    before_step: Whole
    after_forward: Whole
    after_backward: Whole
    after_step: Whole


class Spread(BaseModel):
    """Of several readings of one figure: the least, the median and the most."""

    model_config = KEPT

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

    model_config = KEPT

    sm_mhz: Whole | None = None
    sm_max_mhz: Whole | None = None
    memory_mhz: Whole | None = None
    temperature_c: Whole | None = None
    power_watts: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    num_readings: Whole = 0
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

    model_config = KEPT

    format: Whole = RECORD_FORMAT
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
    peak_allocated_bytes: Whole | None = None
    peak_reserved_bytes: Whole | None = None
    device_bytes: Whole | None = None
    phases: PhaseBytes | None = None
    unit: str | None = Field(None, pattern=UNIT, description="a task's word for an item of a batch")
    compile_seconds: float | None = None
    probe_seconds: float = 0.0
    clocks: Clocks | None = None
    flags: tuple[str, ...] = Field(default=(), description="what may have disturbed the samples")
    free_bytes: Whole | None = Field(default=None, description="of the GPU, when the probe began")
    taken_bytes: Whole | None = Field(
        default=None, description="by other processes from then to the end, or to the failure"
    )
    allowed_bytes: Whole | None = Field(
        default=None, description="what a setting may take in the search that asked for it"
    )
    expected: Expected | None = Field(
        default=None, description="what the search that asked for it believed it would find"
    )
    world: WorldInfo | None = Field(default=None, description="None: one process on one device")
    ranks: tuple[RankRecord, ...] = ()

    @property
    def counts(self) -> str:
        """What an item of its batch is called."""
        return self.unit or unit_of(self.model)

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
    def cut_short(self) -> bool:
        """Whether the budget ended it: then it says a probe's cost, and nothing of its setting."""
        return BUDGET_ENDED in self.flags

    @property
    def inconclusive(self) -> bool:
        """Whether it ended for no fault of its setting, and so says nothing of it: cut short by the
        budget, out of memory or of time while others held or took what it was allowed, or on a
        device that does not answer."""
        return (
            self.cut_short
            or self.lost_device
            or (self.status in ("out_of_memory", "timed_out") and self.was_crowded)
        )

    @property
    def lost_device(self) -> bool:
        """Whether the device failed before anything of the setting was on it: it has fallen off the
        bus, or waits to be reset."""
        return self.status == "crashed" and self.phase == "device"

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


# How training data are loaded: a `DataLoader`'s setting, what was measured of it, what it cost.

Pipeline = Literal["torchvision", "timm", "own"]
"""Who makes a tensor of a picture: torchvision's or timm's transforms, or a Dataset by itself."""

LoaderBound = Literal["processors", "disk", "main process"]
"""`main process` is what one process must do for every batch, and what no worker makes faster."""

MAX_WORKERS = 1024


class LoaderSetting(BaseModel):
    """One way to load: the arguments of `torch.utils.data.DataLoader` and what runs in it.

    `workers` 0 loads in the training process itself; then nothing is prefetched. `batch_size` is
    the micro-batch.
    """

    model_config = KEPT

    pipeline: Pipeline = "torchvision"
    batch_size: Annotated[int, Field(ge=1)] = 64
    workers: Annotated[int, Field(ge=0, le=MAX_WORKERS)] = 8
    prefetch_factor: Annotated[int, Field(ge=1)] = 2
    pin_memory: bool = True

    @property
    def persistent_workers(self) -> bool:
        """Workers go on into the next epoch, where there are any."""
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
        """As a person would say it: `torchvision, 8 workers, prefetch 2, pinned`."""
        number = f"{self.workers} worker{'s' if self.workers > 1 else ''}"
        loads = f"{number}, prefetch {self.prefetch_factor}" if self.workers else "no workers"
        return f"{self.pipeline}, {loads}{', pinned' if self.pin_memory else ''}"


class LoaderRun(BaseModel):
    """One loader measured by itself, in a steady state. `cpu_seconds` are of all its processes, of
    one image; `first_batch_seconds` what its start took."""

    model_config = KEPT

    setting: LoaderSetting
    images_per_second: float = Field(gt=0)
    cpu_seconds: float
    first_batch_seconds: float


class DataResult(BaseModel):
    """What `planner data` found of the data at `location`: a folder, or MODULE:FACTORY.

    `setting` is the fastest of `runs`; `disk_share` is the share of the bytes read that the page
    cache did not hold.
    """

    model_config = KEPT

    location: str
    num_items: Whole | None = None
    num_classes: Whole | None = None
    image_size: tuple[Whole, Whole]
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
    """What a recommendation says of its data: the loader, and a training by the emitted script on
    them. `images_per_second` and `waited` (the share of its time that the device waited for
    batches) are None where the script did not run to its end; then a note says why."""

    model_config = KEPT

    data: DataResult
    steps: Whole = 0
    images_per_second: float | None = None
    waited: float | None = None
    notes: tuple[str, ...] = ()


# What a Swin's authors do to pictures: a loader is measured with it, and a trainer trains with it.
#
# Read in microsoft/Swin-Transformer @f82860b, config.py, where each figure's key stands beside it.


@dataclass(frozen=True)
class Augmentation:
    """What is done to a training picture beside crop and flip, and how each picture is resized."""

    auto_augment: str = "rand-m9-mstd0.5-inc1"  # AUG.AUTO_AUGMENT, in timm's words
    color_jitter: float = 0.4  # AUG.COLOR_JITTER, which timm omits beside an auto_augment
    erasing: float = 0.25  # AUG.REPROB, of AUG.REMODE pixel and AUG.RECOUNT 1
    interpolation: str = "bicubic"  # DATA.INTERPOLATION
    crop_share: float = 0.875  # TEST.CROP: resized to 256/224, cropped at the centre (build.py)


RESULT_FORMAT = 1


class Recommendation(BaseModel):
    """What `planner tune` found. `setting` was run: `evidence` is its own measurement.

    `status` is "recommended", or "nothing_fits" where no probe ran and fit, or none was made
    (then `setting` and `evidence` are None, and `advice` says why and what next).
    `baseline` is the plain default (fp32, eager, no checkpointing, largest batch that fits) where
    it was measured; `gain` is images/s of the recommendation over the baseline's.
    """

    model_config = KEPT

    format: Whole = RESULT_FORMAT
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
    num_probes: Whole = 0
    num_candidates: Whole = 0
    stopped_because: str = ""
    notes: tuple[str, ...] = Field(default=(), description="said to the person, one line each")
    advice: str = ""
    feeding: Feeding | None = Field(default=None, description="where the data were measured too")
    asked: dict[str, JsonValue] | None = Field(
        default=None,
        description="the search's options that are not the defaults, as keywords of `search.tune`",
    )
