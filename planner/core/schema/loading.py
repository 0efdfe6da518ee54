"""How training data is fed to a step: a loader's setting, what a probe of it found, and what is
recommended of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, Field, model_validator

from planner.core.schema.any_model import Model
from planner.core.schema.expected import Expected
from planner.core.schema.faults import CrossFieldError, Fault
from planner.core.schema.figures import KEPT, Whole
from planner.core.schema.record import BUDGET_ENDED, Seconds
from planner.core.schema.setting import TrainSetting

LOADER_FORMAT = 1

SourceKind = Literal["folder", "shards", "table", "factory"]
"""Where items come from: a folder per class of pictures, WebDataset tar shards, a `datasets` table
on disk, a function of the user's that makes a `Dataset`."""

Pipeline = Literal["torchvision", "torchvision-jpeg", "timm", "transformers", "own"]
"""How a picture becomes a tensor: torchvision v2 on PIL; torchvision's own JPEG decoder and v2 on
tensors; timm's loader with its prefetcher; an image processor of transformers; whatever the user's
Dataset does by itself."""
PIPELINES: tuple[Pipeline, ...] = get_args(Pipeline)

LoaderStage = Literal["read", "decode", "transform", "collate", "copy"]
STAGES: tuple[LoaderStage, ...] = get_args(LoaderStage)

LoaderBound = Literal["disk", "decode", "transform", "collate", "copy", "main process", "step"]
"""What a loader's rate is bound by; `main process` is what one process must do for every batch."""

MAX_WORKERS = 1024


class ItemFault(BaseModel):
    """An item that could not be loaded as it should: which, what was wrong, how often."""

    model_config = KEPT

    item: str = Field(description="the file, or the index in the data set")
    message: str
    count: Whole = 1


class DataSource(BaseModel):
    """The user's data, as found. `location` is a path or MODULE:FACTORY; sizes are in bytes.

    `fingerprint` changes when the data do: records of other data do not count for these. Of more
    than 10,000 files `total_bytes` is extrapolated from a sample. `faults` are what was passed
    over when the data were looked for: an empty class, a folder without rights, no pictures.
    """

    model_config = KEPT

    kind: SourceKind
    location: str
    num_items: Whole | None = None
    num_classes: Whole | None = None
    total_bytes: Whole | None = None
    fingerprint: str = ""
    synthetic: bool = Field(default=False, description="made by `planner data --synthetic`")
    faults: tuple[ItemFault, ...] = ()


class LoaderSetting(BaseModel):
    """One way to load: the arguments of `torch.utils.data.DataLoader` and what runs in it.

    `workers` 0 loads in the training process itself; then nothing is prefetched or persistent.
    `image_size` is (height, width) in pixels of what comes out, `batch_size` the micro-batch.
    """

    model_config = KEPT

    pipeline: Pipeline = "torchvision"
    batch_size: Annotated[int, Field(ge=1)] = 64
    image_size: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] = (224, 224)
    workers: Annotated[int, Field(ge=0, le=MAX_WORKERS)] = 8
    prefetch_factor: Annotated[int, Field(ge=1)] | None = 2
    pin_memory: bool = True
    persistent_workers: bool = True

    @model_validator(mode="before")
    @classmethod
    def _without_workers(cls, data: Any) -> Any:
        """What was not said of a loader without workers is what torch then asks for."""
        if isinstance(data, Mapping) and data.get("workers") == 0:
            return {"prefetch_factor": None, "persistent_workers": False, **data}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> LoaderSetting:
        faults = list(self._faults())
        if faults:
            raise CrossFieldError(faults)
        return self

    def _faults(self) -> Iterator[Fault]:
        if self.workers == 0:
            if self.prefetch_factor is not None:
                message = f"prefetch_factor {self.prefetch_factor} needs workers, and there are 0"
                yield Fault(("prefetch_factor", "workers"), message)
            if self.persistent_workers:
                message = "persistent_workers needs workers, and there are 0"
                yield Fault(("persistent_workers", "workers"), message)
        elif self.prefetch_factor is None:
            message = "prefetch_factor is a number of batches where there are workers, not None"
            yield Fault(("prefetch_factor", "workers"), message)

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `torch.utils.data.DataLoader`. Only here are the two matched."""
        return {
            "batch_size": self.batch_size,
            "num_workers": self.workers,
            "prefetch_factor": self.prefetch_factor,
            "pin_memory": self.pin_memory,
            "persistent_workers": self.persistent_workers,
        }

    @property
    def title(self) -> str:
        """As a person would say it: `torchvision, 8 workers × 2, pinned`."""
        words: list[str] = [self.pipeline]
        number = f"{self.workers} worker{'s' if self.workers > 1 else ''}"
        words.append(f"{number} × {self.prefetch_factor}" if self.workers else "no workers")
        words += ["pinned"] if self.pin_memory else []
        words += ["persistent"] if self.persistent_workers else []
        return ", ".join(words)


LoaderStatus = Literal["measured", "faulty", "out_of_memory", "timed_out", "crashed", "unsupported"]


def recorded_processors(host: Mapping[str, Any]) -> float | None:
    """Those that a process could keep busy on a recorded machine (`Host.cpus`), None where they
    were not recorded."""
    found = [host.get("usable_cpus"), host.get("quota_cpus")]
    known = [value for value in found if isinstance(value, int | float) and value > 0]
    return min(known, default=None)


class LoaderRecord(BaseModel):
    """What one probe of a loader found. Bytes are integers, times are seconds, `date` is ISO 8601
    in UTC.

    `batch_seconds` are the times between batches in a steady state, after the workers' start and
    what they had prefetched meanwhile. `cpu_seconds_per_image` counts all processes of the loader.
    `stage_seconds` are of one image, as timed in one process without others: of the processor, but
    of the clock where reading, or a user's own Dataset (all of it is `transform`), may wait.
    `shared_memory_bytes` are at least what all batches that may wait take, as they do where a
    training is slower than its loader.
    `host` holds what bounds a loader on that machine: processors, quota, shared memory.
    """

    model_config = KEPT

    loader_format: Whole = LOADER_FORMAT
    probe_id: str = ""
    data: DataSource
    setting: LoaderSetting
    host: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    date: str = ""
    status: LoaderStatus
    message: str = ""
    batch_seconds: tuple[Seconds, ...] = ()
    images_per_second: float | None = None
    first_batch_seconds: float | None = None
    cpu_seconds_per_image: float | None = None
    worker_bytes: Whole | None = Field(default=None, description="of one worker, its own (USS)")
    main_bytes: Whole | None = None
    shared_memory_bytes: Whole | None = Field(default=None, description="/dev/shm at its fullest")
    open_files: Whole | None = Field(default=None, description="of one process, at the most")
    cold_share: float | None = Field(
        default=None, description="of what was read, that the page cache did not hold"
    )
    stage_seconds: dict[LoaderStage, float] = Field(default_factory=dict)
    bound: LoaderBound | None = None
    faults: tuple[ItemFault, ...] = ()
    probe_seconds: float = 0.0
    flags: tuple[str, ...] = ()
    expected: Expected | None = Field(
        default=None, description="what the search that asked for it believed it would find"
    )

    @property
    def format(self) -> int:
        return self.loader_format

    @property
    def samples(self) -> tuple[float, ...]:
        """What its rate is the median of, in seconds."""
        return self.batch_seconds

    def with_samples(self, samples: tuple[float, ...]) -> Self:
        return self.model_copy(update={"batch_seconds": samples})

    @property
    def used_bytes(self) -> int | None:
        """What it took of the host: the training process, its workers, the batches they hold."""
        if self.main_bytes is None and self.worker_bytes is None:
            return None
        workers = self.setting.workers * (self.worker_bytes or 0)
        return (self.main_bytes or 0) + workers + (self.shared_memory_bytes or 0)

    @property
    def cut_short(self) -> bool:
        """Whether the budget ended it: then it says a probe's cost, and nothing of its setting."""
        return BUDGET_ENDED in self.flags

    @property
    def inconclusive(self) -> bool:
        """Whether it ended for no fault of its setting, and so says nothing of it."""
        return self.cut_short

    @property
    def lost_device(self) -> bool:
        """A loader needs none."""
        return False

    def judged_in(self, allowed_bytes: int | None) -> Self:
        """The same record: a loader that ran has run, whatever a search allows now."""
        return self


class StepRate(BaseModel):
    """What a model's training step takes by the estimate (predicted, on a GPU that need not be
    here), and whether the loader brings it."""

    model_config = KEPT

    model: str
    gpu: str
    setting: TrainSetting
    images_per_second: float
    uncertainty: float = Field(description="relative: 0.35 is 35% either way")
    bound: Literal["loader", "step"]
    needed_cpus: float | None = Field(
        default=None, description="processors that would feed it, by the processor time per image"
    )


class DataRecommendation(BaseModel):
    """`data.json`: the loader to use, the probe that proves it, and the runners-up.

    `setting` was run: `evidence` is its own measurement. Both are None where nothing loads, and
    `advice` then says what to do. `ways_out` are what would load faster, `warnings` what of the
    machine or the data is in the way; `faults` the items that no probe could load.
    """

    model_config = KEPT

    loader_format: Whole = LOADER_FORMAT
    data: DataSource
    date: str
    setting: LoaderSetting | None
    evidence: LoaderRecord | None
    runners_up: tuple[LoaderRecord, ...] = ()
    host: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    num_probes: Whole = 0
    num_candidates: Whole = 0
    stopped_because: str = ""
    step: StepRate | None = None
    ways_out: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    faults: tuple[ItemFault, ...] = ()
    left_out: tuple[str, ...] = Field(default=(), description="what cannot be here, and why")
    notes: tuple[str, ...] = ()
    advice: str = ""


class FedRecord(BaseModel):
    """One real training run of a setting, fed by a real loader: what proves a step and a loader
    together.

    `step_seconds` are whole optimizer steps with their batches, `wait_seconds` what of each the
    training waited for batches. `resident_seconds` are steps on a batch that lay in memory, timed
    just before in the same process. Seconds of processor time per image: `step_cpu_seconds` of
    those, `fed_cpu_seconds` of fed steps with all that loads for them. `predicted` is what the law
    of the two rates says (`planner/throughput/feeding.py`), of the rates measured apart.
    """

    model_config = KEPT

    loader_format: Whole = LOADER_FORMAT
    model: Model
    setting: TrainSetting
    loader: LoaderSetting
    data: DataSource
    date: str = ""
    status: LoaderStatus
    message: str = ""
    step_seconds: tuple[Seconds, ...] = ()
    wait_seconds: tuple[float, ...] = ()
    resident_seconds: tuple[Seconds, ...] = ()
    step_cpu_seconds: float | None = None
    fed_cpu_seconds: float | None = None
    fault: ItemFault | None = Field(default=None, description="that ended it")
    images_per_second: float | None = None
    predicted: float | None = None
    probe_seconds: float = 0.0
    flags: tuple[str, ...] = ()

    @property
    def format(self) -> int:
        return self.loader_format


class Feeding(BaseModel):
    """What a recommendation says of the data: which loader, which of loader and step bounds, and
    the run that proves it."""

    model_config = KEPT

    loader: LoaderSetting
    evidence: LoaderRecord
    bound: Literal["loader", "step"]
    waiting_share: float = Field(description="of its time, that the device waits for batches")
    needed_workers: Whole | None = Field(
        default=None, description="that would feed the step; None where no number of them would"
    )
    together: FedRecord | None = None
    notes: tuple[str, ...] = ()
