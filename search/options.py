"""What a search was asked, beyond the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from planner.errors import UsageError, shorten, unknown_name
from planner.schema import TrainSetting, parse
from planner.schema.model import MAX_SIZE
from planner.units import MAX_SECONDS
from search.space import AXES
from search.strategies.strategy import TOLERANCE
from search.strategies.walks import WALKS
from search.study.study import STUDY_NAME

STRATEGIES = ("planner", "tpe", "gp", "random", *WALKS)
BUDGET_SECONDS = 600.0
IMAGENET_IMAGES = 1_281_167  # ImageNet-1k's training split, what an epoch means unless said
MAX_NAME = 100
_MANY = 1 << 40

# option -> its least and its largest value, whole numbers
_COUNTS = {
    "global_batch": (1, MAX_SIZE),
    "trials": (0, _MANY),
    "steps": (1, _MANY),
    "images_per_epoch": (1, _MANY),
    "seed": (0, (1 << 32) - 1),
}


@dataclass(frozen=True)
class Options:
    """What `tune` was asked, beyond the model; the fields are its parameters. Raises UsageError,
    with every fault, where they are out of their bounds or say nothing together."""

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

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            way_out = f"One of {', '.join(STRATEGIES)}."
            raise unknown_name("strategy", self.strategy, STRATEGIES, way_out)
        faults = [*self._bounds(), *self._conflicts()]
        if len(faults) == 1:
            raise UsageError(f"{faults[0]}.")
        if faults:
            listed = "\n".join(f"  {fault}" for fault in faults)
            raise UsageError(f"the search has {len(faults)} faults:\n{listed}")

    def _bounds(self) -> Iterator[str]:
        for name, (least, most) in _COUNTS.items():
            value = getattr(self, name)
            if value is None and name not in ("seed", "images_per_epoch"):
                continue
            if not _is_number(value, whole=True) or not least <= value <= most:
                yield f"{name} is a number from {least} to {most:,}, and {shorten(value)} is not"
        for name in ("headroom", "tolerance"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value < 1:
                yield f"{name} is a share from 0 to under 1, and {shorten(value)} is not"
        if self.epochs is not None and not (_is_number(self.epochs) and 0 < self.epochs <= _MANY):
            yield f"epochs are a number above 0, and {shorten(self.epochs)} is not"
        budget = self.budget_seconds
        if budget is not None and not (_is_number(budget) and 0 <= budget <= MAX_SECONDS):
            yield f"budget_seconds are from 0 to ten years, or None, and {shorten(budget)} is not"
        for name in ("device", "study_name", "storage"):
            value = getattr(self, name)
            if not isinstance(value, str | None) or value == "" or len(value or "") > 1000:
                yield f"{name} is a name, and {shorten(value)} is not"

    def _conflicts(self) -> Iterator[str]:
        if self.steps is not None and self.epochs is not None:
            yield "steps and epochs both say how long the training is: leave one out"
        if self.images_per_epoch != IMAGENET_IMAGES and self.epochs is None:
            yield "images_per_epoch says how long an epoch is, and no epochs are asked for"
        if self.global_batch is not None and self.base.accumulate != 1:
            yield "accumulate follows from global_batch and the micro-batch: leave one of them out"
        if self.replay is None:
            return
        on_a_device = {
            "device": self.device != "auto",
            "batch_size": self.batch_sizes,
            "global_batch": self.global_batch,
            ", ".join(self.restrict or ()): self.restrict,
            "storage": self.storage,
            "study_name": self.study_name != STUDY_NAME,
            "accept_different": self.accept_different,
        }
        given = [name for name, value in on_a_device.items() if value]
        if given:
            yield f"a replay searches all that was recorded: leave out {', '.join(given)}"


def read_batch_sizes(batch_size: object) -> tuple[int, ...] | None:
    """One micro-batch, or those to try. Raises UsageError."""
    if batch_size is None:
        return None
    sizes = tuple(batch_size) if isinstance(batch_size, Sequence) else (batch_size,)
    if isinstance(batch_size, str) or not sizes:
        raise UsageError(f"batch_size is a number or several, and {shorten(batch_size)} is not.")
    return tuple(
        parse(TrainSetting, {"batch_size": size}, "batch_size").batch_size for size in sizes
    )


def read_base(base: TrainSetting | Mapping[str, Any] | None) -> TrainSetting:
    """The setting that all probes share, or its fields. Raises UsageError."""
    if isinstance(base, TrainSetting):
        return base
    setting = parse(TrainSetting, {} if base is None else base, "base")
    searched = [axis for axis in AXES if axis != "optimizer" and axis in (base or {})]
    if searched:
        raise UsageError(
            f"base holds for every probe, and {', '.join(searched)} is what is searched.",
            f"Write restrict={{{searched[0]!r}: …}}.",
        )
    return setting


def read_restrictions(
    restrict: Mapping[str, str | Sequence[str]] | None,
) -> dict[str, tuple[str, ...]] | None:
    """The values each axis is held to; one may stand by itself. Raises UsageError."""
    if restrict is None:
        return None
    if not isinstance(restrict, Mapping):
        raise UsageError(f"restrict names values by axis, and {shorten(restrict)} does not.")
    found = {}
    for axis, given in restrict.items():
        if axis not in AXES:
            raise unknown_name("axis", axis, AXES, f"One of {', '.join(AXES)}.")
        values = (given,) if isinstance(given, str) else given
        texts = isinstance(values, Sequence) and all(isinstance(v, str) and v for v in values)
        if not texts or not values:
            raise UsageError(
                f"restrict names the values {axis} may take, and {shorten(given)} names none.",
                "Leave the axis out to search all of it.",
            )
        found[axis] = tuple(values)
    return found


def read_path(name: str, value: str | PathLike[str] | None) -> Path | None:
    """A path, None where none was given. Raises UsageError."""
    if value is None:
        return None
    if not isinstance(value, str | PathLike) or value == "":
        raise UsageError(f"{name} is a path, and {shorten(value)} is not.")
    return Path(value)


def _is_number(value: object, whole: bool = False) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        return False
    return math.isfinite(value)
