"""What a search may be asked, beyond the model. Each option is declared once, in `SearchOptions`:
its default, what is said of it, how it is read. `tune` and the command both take it from there."""

# `option` makes a field: what it is called with is the default, and no call is made later.
# ruff: noqa: RUF009

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any, TypedDict

from planner.core.errors import UsageError, shorten, unknown_name
from planner.core.files import named_path
from planner.core.schema import TrainSetting, parse
from planner.core.schema.distribution import SEVERAL
from planner.core.schema.model import MAX_SIZE
from planner.core.schema.validation import declared_options, option, switch
from planner.core.units import (
    MAX_SECONDS,
    exact,
    exact_bytes,
    exact_seconds,
    parse_percent,
    parse_seconds,
)
from planner.estimation.arguments import SettingLike, read_allocator, read_memory, read_setting
from planner.throughput.cost import IMAGENET_IMAGES
from search.loop.axes import AXES, TOLERANCE, Restriction, Value, read_values

MANY = 1 << 40
SEARCH, DEVICE, TRAINING = "Search", "Device", "Whole training"  # headings of --help


def read_keywords(kind: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of such a class that keywords mean. Raises UsageError for what is none of them or
    cannot be read."""
    values, declared = dict(given), declared_options(kind)
    unknown = next((name for name in values if name not in declared), None)
    if unknown is not None:
        where = "restrict" if unknown in AXES else "base"
        is_setting = where in declared and unknown in TrainSetting.model_fields
        way_out = f"Write {where}={{{unknown!r}: …}}." if is_setting else ""
        raise unknown_name("option", unknown, declared, way_out)
    for name, said in declared.items():
        if said.read is not None and name in values:
            values[name] = said.read(values[name])
    return values


def refuse(faults: Sequence[str]) -> None:
    """Raises UsageError with all faults of a search's options, where there are any."""
    if len(faults) == 1:
        raise UsageError(f"{faults[0]}.")
    if faults:
        listed = "\n".join(f"  {fault}" for fault in faults)
        raise UsageError(f"the search has {len(faults)} faults:\n{listed}")


def bound_faults(options: Any) -> Iterator[str]:
    """What is out of its bounds in an instance of such a class, a line each."""
    named = {f.name: (f, getattr(options, f.name)) for f in fields(options)}
    for name, (f, value) in named.items():
        bounds = f.metadata["option"].bounds
        if bounds is None or (value is None and f.default is None):
            continue
        least, most = bounds
        if not _is_number(value, whole=True) or not least <= value <= most:
            yield f"{name} is a number from {least} to {most:,}, and {shorten(value)} is not"
    for name in ("headroom", "tolerance"):
        value = getattr(options, name, 0)
        if not _is_number(value) or not 0 <= value < 1:
            yield f"{name} is a share from 0 to under 1, and {shorten(value)} is not"
    budget = options.budget_seconds
    if budget is not None and not (_is_number(budget) and 0 <= budget <= MAX_SECONDS):
        yield f"budget_seconds are from 0 to ten years, or None, and {shorten(budget)} is not"
    for name in ("device", "storage"):
        value = getattr(options, name, None)
        if not isinstance(value, str | None) or value == "" or len(value or "") > 1000:
            yield f"{name} is a name, and {shorten(value)} is not"


def read_allocator_text(allocator: str | None) -> str | None:
    """The caching allocator's options. Raises UsageError, and UnsupportedError for another
    backend than torch's own."""
    read_allocator(allocator)
    return allocator


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
    restrict: Mapping[str, Value | Sequence[Value]] | None,
) -> dict[str, tuple[Value, ...]] | None:
    """The values each axis is held to, None where none is; one may stand by itself. Raises
    UsageError."""
    if restrict is None:
        return None
    if not isinstance(restrict, Mapping):
        raise UsageError(f"restrict names values by axis, and {shorten(restrict)} does not.")
    return {axis: read_values(axis, given) for axis, given in restrict.items()} or None


def read_start(start: TrainSetting | Mapping[str, Any] | str | None) -> TrainSetting | None:
    """The setting to begin with: its fields, also as `batch_size=32,checkpointing=stages:0,1`.
    Raises UsageError."""
    if isinstance(start, str):
        parts = re.split(r",(?=\w+=)", start)  # a comma may be part of a value
        start = dict(part.strip().partition("=")[::2] for part in parts)
    return None if start is None else read_setting(start, {})


def start_text(start: TrainSetting) -> str:
    """What `read_start` reads."""
    fields = start.differences(TrainSetting()) or {"batch_size": start.batch_size}
    return ",".join(f"{field}={str(value).lower()}" for field, value in fields.items())


def path_reader(name: str) -> Callable[[str | PathLike[str] | None], Path | None]:
    """Reads the path of option `name`, None where none was given. It raises UsageError."""

    def read(value: str | PathLike[str] | None) -> Path | None:
        return None if value is None else named_path(value, name)

    return read


def read_data(value: str | PathLike[str] | None) -> str | None:
    """What names data, None where nothing was given. Raises UsageError."""
    if value is None:
        return None
    if not isinstance(value, str | PathLike) or str(value) == "":
        raise UsageError(f"data is a path or MODULE:FACTORY, and {shorten(value)} is not.")
    return str(value)


def read_budget(text: str) -> float | None:
    """A duration that was typed, or none. Raises UsageError."""
    return None if text.strip().lower() == "none" else parse_seconds(text)


def _budget_text(seconds: float | None) -> str:
    return "none" if seconds is None else exact_seconds(seconds)


def _is_number(value: object, whole: bool = False) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        return False
    return math.isfinite(value)


class SearchKeywords(TypedDict, total=False):
    """The keywords of `tune`; `SearchOptions` has what they mean, and the defaults."""

    device: str
    trials: int | None
    budget_seconds: float | None
    tolerance: float
    storage: str | None
    output: Path | str | None
    accept_different: bool
    gpus: int | None
    memory_bytes: int | str | None
    allocator: str | None
    headroom: float
    batch_size: int | Sequence[int] | None
    global_batch: int | None
    base: SettingLike | None
    restrict: Mapping[str, Value | Sequence[Value]] | None
    start: SettingLike | str | None
    steps: int | None
    epochs: float | None
    data: str | PathLike[str] | None


@dataclass(frozen=True)
class SearchOptions:
    """What `tune` was asked, beyond the model; the fields are its parameters. Raises UsageError,
    with every fault, where they are out of their bounds or contradict each other."""

    batch_size: tuple[int, ...] | None = option(read=read_batch_sizes)
    base: TrainSetting = option(default=TrainSetting, read=read_base)
    restrict: Restriction | None = option(read=read_restrictions)
    start: TrainSetting | None = option(
        "Probe this first, and search around it: batch_size=32,precision=bf16.",
        "FIELD=VALUE,…", SEARCH, read=read_start, written=start_text,
    )  # fmt: skip
    global_batch: int | None = option(
        "Hold the images of an optimizer step, on all GPUs, at exactly N.", "N", SEVERAL,
        bounds=(1, MAX_SIZE),
    )  # fmt: skip
    device: str = option("auto, cpu, cuda:0 …", "DEVICE", DEVICE, default="auto", values="devices")
    gpus: int | None = option(
        "Probe over N GPUs, a process on each (with --device cpu: N processes).", "N", SEVERAL,
        bounds=(1, MAX_SIZE),
    )  # fmt: skip
    memory_bytes: int | None = option(
        "Emulate a smaller device: 24GiB, 24GB.", "SIZE", DEVICE, "--memory", read=read_memory,
        written=exact_bytes,
    )  # fmt: skip
    allocator: str | None = option(
        "Used in place of PYTORCH_CUDA_ALLOC_CONF.", "OPTIONS", DEVICE, read=read_allocator_text
    )
    headroom: float = option(
        "Memory to keep free.", "SHARE", DEVICE, default="5%", typed=parse_percent, written=exact
    )
    trials: int | None = option("At most N probes in the study.", "N", SEARCH, bounds=(0, MANY))
    budget_seconds: float | None = option(
        "Time for probes (90s, 10m, 1h30m), or none.", "TIME", SEARCH, "--budget", default="10m",
        typed=read_budget, written=_budget_text,
    )  # fmt: skip
    tolerance: float = option(
        "Stop when no probe is expected to raise images/s by more.", "SHARE", SEARCH,
        default=f"{TOLERANCE:.1%}", typed=parse_percent, written=exact,
    )  # fmt: skip
    steps: int | None = option(
        "Rank by the total time of N optimizer steps, compilation included.", "N", TRAINING,
        bounds=(1, MANY),
    )  # fmt: skip
    epochs: float | None = option(
        "As --steps, for N epochs of ImageNet-1k.", "N", TRAINING, written=exact
    )
    storage: str | None = option("An Optuna storage, or a .journal file.", "URL", "Study")
    output: Path | None = option(
        "Folder for the results.", "DIR", "Output", shown="tune-LIBRARY-NAME", values="dir",
        read=path_reader("output"),
    )  # fmt: skip
    data: str | None = option(
        "End with 30 steps of the emitted script on these data: pictures, or a Dataset.",
        "DIR|MODULE:FACTORY", "Data", values="dir", read=read_data,
    )  # fmt: skip
    accept_different: bool = switch(
        "Go on with a study of another device or software.", heading="Study"
    )

    @classmethod
    def of(cls, given: SearchKeywords) -> SearchOptions:
        """The options that keywords of `tune` mean. Raises UsageError."""
        return cls(**read_keywords(cls, dict(given)))

    @property
    def asked(self) -> TrainSetting:
        """The setting the person would have used: what the learning rate is compared with."""
        if self.global_batch:
            size = self.global_batch // self.base.world_size
            return self.base.model_copy(update={"batch_size": size, "accumulate": 1})
        if self.batch_size is None:
            return self.base
        return self.base.model_copy(update={"batch_size": self.batch_size[0]})

    @property
    def chose_batch(self) -> bool:
        """Whether one batch was named, by itself or as images of a step."""
        is_one = len(self.batch_size or ()) == 1 or "batch_size" in self.base.model_fields_set
        return is_one or self.global_batch is not None

    @property
    def images(self) -> float | None:
        """Images of the whole training on one device, where its length was said."""
        world = self.base.world_size
        if self.steps is not None:
            return self.steps * self.asked.global_batch / world
        if self.epochs is not None:
            return self.epochs * IMAGENET_IMAGES / world
        return None

    def __post_init__(self) -> None:
        refuse([*bound_faults(self)] or [*self._conflicts()])
        object.__setattr__(self, "base", self._spread_base())

    def _spread_base(self) -> TrainSetting:
        """`base` over the devices that were asked for: under DDP, unless it was said how."""
        ways = (self.restrict or {}).get("parallelism", ())
        changes: dict[str, Any] = {"parallelism": ways[0]} if ways else {}
        if self.gpus is not None:
            changes["world_size"] = self.gpus
            if self.base.parallelism == "none" and not ways:
                changes["parallelism"] = "ddp"
        return self.base.model_copy(update=changes)

    def _conflicts(self) -> Iterator[str]:
        if self.epochs is not None and not (_is_number(self.epochs) and 0 < self.epochs <= MANY):
            yield f"epochs are a number above 0, and {shorten(self.epochs)} is not"
        if self.steps is not None and self.epochs is not None:
            yield "steps and epochs both say how long the training is: omit one"
        if self.global_batch is not None and self.base.accumulate != 1:
            yield "accumulate follows from global_batch and the micro-batch: omit one of them"
        yield from self._world_conflicts()

    def _world_conflicts(self) -> Iterator[str]:
        """What does not go with several devices, or says them twice."""
        world, ways = self.gpus or self.base.world_size, (self.restrict or {}).get("parallelism")
        if self.gpus is not None and self.base.world_size not in (1, self.gpus):
            yield f"gpus is {self.gpus}, and base has world_size {self.base.world_size}: omit one"
        if (self.gpus or 1) > 1 and "none" in (ways or ()):
            yield (
                f"parallelism none trains {world} models, and not one on {world} GPUs: omit it, or "
                "omit gpus"
            )
