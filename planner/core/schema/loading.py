"""How training data are loaded: a `DataLoader`'s setting, what was measured of it, what it cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from planner.core.schema.validation import KEPT, Whole

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
