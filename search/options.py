"""What a search was asked, beyond the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from planner.schema import TrainSetting
from search.baselines import WALKS
from search.strategy import TOLERANCE
from search.study import STUDY_NAME

STRATEGIES = ("planner", "tpe", "gp", "random", *WALKS)
BUDGET_SECONDS = 600.0
IMAGENET_IMAGES = 1_281_167  # ImageNet-1k's training split, what an epoch means unless said


@dataclass(frozen=True)
class Options:
    """What `tune` was asked, beyond the model; the fields are its parameters."""

    device: str = "auto"
    memory_bytes: int | None = None
    headroom: float = 0.05
    batch_sizes: tuple[int, ...] | None = None
    global_batch: int | None = None
    base: TrainSetting = field(default_factory=TrainSetting)
    restrict: Mapping[str, Sequence[str]] | None = None
    trials: int | None = None
    budget_seconds: float | None = BUDGET_SECONDS
    strategy: str = "planner"
    storage: str | None = None
    study_name: str = STUDY_NAME
    output: Path | None = None
    replay: Path | None = None
    steps: int | None = None
    epochs: float | None = None
    images_per_epoch: int = IMAGENET_IMAGES
    tolerance: float = TOLERANCE
    baseline: bool = True
    accept_different: bool = False
    seed: int = 0
