"""The options of a search, beyond the model. Each is declared once, in `SearchOptions`: `tune` and
the command take it from there. A result keeps the ones that are not defaults."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    PlainValidator,
    model_validator,
)

from planner.core.errors import Fault, refuse_if, shorten
from planner.core.files import named_path
from planner.core.schema import SwinConfig, TrainSetting, parse
from planner.core.schema.setting import SEVERAL, Count, Distribution
from planner.core.schema.validation import Checked, Option
from planner.core.units import MAX_SECONDS, parse_percent, parse_seconds
from planner.estimation.arguments import read_allocator, read_memory, read_setting
from planner.estimation.predicted import Predicted
from search.loop.space import AXES, TOLERANCE, Restriction, read_values

MANY = 1 << 40
SEARCH, DEVICE = "Search", "Device"  # headings of --help


# Readers of values, given in Python or as they are typed.


def read_base(base: TrainSetting | Mapping[str, Any] | None) -> TrainSetting:
    """The setting that all probes share, from a setting or its fields. Raises UsageError."""
    if isinstance(base, TrainSetting):
        return base
    setting = parse(TrainSetting, {} if base is None else base, "base")
    searched = [axis for axis in AXES if axis != "optimizer" and axis in (base or {})]
    refuse_if(
        searched,
        f"base holds for every probe, and {', '.join(searched)} is what is searched.",
        f"Write restrict={{{', '.join(map(repr, searched[:1]))}: …}}.",
    )
    return setting


def changed_fields(setting: TrainSetting) -> dict[str, object]:
    """The fields that are not at their defaults."""
    return setting.differences(TrainSetting())


def held_fields(base: TrainSetting) -> dict[str, object]:
    """The changed fields that hold for every probe."""
    return {f: v for f, v in changed_fields(base).items() if f == "optimizer" or f not in AXES}


def read_restrictions(restrict: Any) -> Restriction:
    """The values to which each axis is restricted; a single one needs no sequence. Raises
    UsageError."""
    restrict = {} if restrict is None else restrict
    law = f"restrict names values by axis, and {shorten(restrict)} does not."
    example = "For example restrict={'precision': ['bf16']}."
    refuse_if(not isinstance(restrict, Mapping), law, example)
    return {axis: read_values(axis, values) for axis, values in restrict.items()}


def read_start(start: TrainSetting | Mapping[str, Any] | str) -> TrainSetting:
    """The setting to begin with, from its fields or a text as
    `batch_size=32,checkpointing=stages:0,1`. Raises UsageError."""
    if isinstance(start, str):
        parts = re.split(r",(?=\w+=)", start)  # a comma may be part of a value
        start = dict(part.strip().partition("=")[::2] for part in parts)
    return read_setting(start, {})


def read_seconds(value: Any) -> Any:
    """The seconds of a duration; None for `none`. Raises UsageError."""
    if not isinstance(value, str):
        return value
    return None if value.strip().lower() == "none" else parse_seconds(value)


def hidden_password(storage: str) -> str:
    """A storage's address that can be printed: `postgresql://user:***@host/db`."""
    shown = re.sub(r"://([^:]*):.*@", r"://\1:***@", storage)
    # The options may hold a password too.
    return shown if shown.startswith("sqlite") else re.sub(r"\?.*", "?…", shown)


def _checked_allocator(options: str) -> str:
    read_allocator(options)
    return options


Sizes = Annotated[
    tuple[Count, ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, int | str) else value),
    Field(min_length=1),
]
Base = Annotated[TrainSetting, BeforeValidator(read_base), PlainSerializer(held_fields)]
Axes = Annotated[Restriction, PlainValidator(read_restrictions)]
Start = Annotated[TrainSetting, BeforeValidator(read_start), PlainSerializer(changed_fields)]
Bytes = Annotated[int, BeforeValidator(read_memory)]
Allocator = Annotated[str, BeforeValidator(_checked_allocator)]
Share = Annotated[
    float,
    BeforeValidator(lambda value: parse_percent(value) if isinstance(value, str) else value),
    Field(ge=0, lt=1),
]
Probes = Annotated[int, Field(ge=0, le=MANY)]
Time = Annotated[
    Annotated[float, Field(ge=0, le=MAX_SECONDS)] | None, BeforeValidator(read_seconds)
]
Name = Annotated[str, Field(min_length=1, max_length=1000)]
Storage = Annotated[Name, PlainSerializer(hidden_password)]
Folder = Annotated[Path, BeforeValidator(lambda value: named_path(value, "output"))]
Data = Annotated[str, BeforeValidator(lambda value: str(named_path(value, "data")))]


class SearchOptions(Checked):
    """The options of `tune`, beyond the model; the fields are its parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    batch_size: Sizes | None = None
    base: Base = TrainSetting()
    restrict: Axes = {}  # noqa: RUF012 (pydantic copies it)
    start: Annotated[
        Start | None,
        Option("Probe this first, and search around it: batch_size=32,precision=bf16.",
               "FIELD=VALUE,…", SEARCH),
    ] = None  # fmt: skip
    global_batch: Annotated[
        Count | None,
        Option("Hold the images of an optimizer step, on all GPUs, at exactly N.", "N", SEVERAL),
    ] = None
    device: Annotated[
        Name, Option("auto, cpu, cuda:0 …", "DEVICE", DEVICE, shown="auto", values="devices")
    ] = "auto"
    gpus: Annotated[
        Count | None,
        Option("Probe over N GPUs, a process on each (with --device cpu: N processes).", "N",
               SEVERAL),
    ] = None  # fmt: skip
    memory_bytes: Annotated[
        Bytes | None, Option("Emulate a smaller device: 24GiB, 24GB.", "SIZE", DEVICE, "--memory")
    ] = None
    allocator: Annotated[
        Allocator | None, Option("Used in place of PYTORCH_CUDA_ALLOC_CONF.", "OPTIONS", DEVICE)
    ] = None
    headroom: Annotated[Share, Option("Memory to keep free.", "SHARE", DEVICE, shown="5%")] = 0.05
    trials: Annotated[Probes | None, Option("At most N probes in the study.", "N", SEARCH)] = None
    budget_seconds: Annotated[
        Time,
        Option("Time for probes (90s, 10m, 1h30m), or none.", "TIME", SEARCH, "--budget",
               shown="10m"),
    ] = 600.0  # fmt: skip
    tolerance: Annotated[
        Share,
        Option("Stop when three more probes should raise images/s by less.", "SHARE", SEARCH,
               shown=f"{TOLERANCE:.1%}"),
    ] = TOLERANCE  # fmt: skip
    storage: Annotated[
        Storage | None, Option("An Optuna storage, or a .journal file.", "URL", "Study")
    ] = None
    output: Annotated[
        Folder | None,
        Option("Folder for the results.", "DIR", "Output", shown="tune-LIBRARY-NAME", values="dir"),
    ] = None
    data: Annotated[
        Data | None,
        Option("End with 30 steps of the emitted script on these data: pictures, or a Dataset.",
               "DIR|MODULE:FACTORY", "Data", values="dir"),
    ] = None  # fmt: skip
    accept_different: Annotated[
        bool, Option("Go on with a study of another device or software.", heading="Study")
    ] = False

    @property
    def kept(self) -> dict[str, JsonValue]:
        """The options that are not defaults; a password in the storage's address is left out."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @property
    def asked(self) -> TrainSetting:
        """The setting that the person would have used, with which the learning rate is compared."""
        if self.global_batch:
            size = self.global_batch // self.base.world_size
            return self.base.model_copy(update={"batch_size": size, "accumulate": 1})
        if self.batch_size is None:
            return self.base
        return self.base.model_copy(update={"batch_size": self.batch_size[0]})

    @property
    def chose_batch(self) -> bool:
        """Whether a single batch was named, by itself or as the images of a step."""
        is_one = len(self.batch_size or ()) == 1 or "batch_size" in self.base.model_fields_set
        return is_one or self.global_batch is not None

    @model_validator(mode="after")
    def _spread(self) -> Self:
        """Spreads `base` over the devices that were asked for: under DDP, unless a way was
        named."""
        ways = self.restrict.get("parallelism", ())
        changes: dict[str, Any] = {"parallelism": ways[0]} if ways else {}
        if self.gpus is not None:
            changes["world_size"] = self.gpus
            if self.base.parallelism == "none" and not ways:
                changes["parallelism"] = "ddp"
        object.__setattr__(self, "base", self.base.model_copy(update=changes))
        return self

    def _faults(self) -> Iterator[Fault]:
        base, gpus = self.base, self.gpus or 1
        if self.global_batch is not None and base.accumulate != 1:
            law = "accumulate follows from global_batch and the micro-batch"
            way_out = "Omit global_batch, or accumulate in base."
            yield Fault(law, way_out=way_out, fields=("global_batch", "base"))
        if self.gpus is not None and base.world_size not in (1, gpus):
            law = f"gpus is {gpus}, and base has world_size {base.world_size}"
            way_out = "Omit gpus, or world_size in base."
            yield Fault(law, way_out=way_out, fields=("gpus", "base"))
        if gpus > 1 and "none" in self.restrict.get("parallelism", ()):
            law = f"parallelism none trains {gpus} models, and not one on {gpus} GPUs"
            way_out = "Omit gpus, or none in restrict's parallelism."
            yield Fault(law, way_out=way_out, fields=("gpus", "restrict"))


def read_options(options: Mapping[str, Any]) -> SearchOptions:
    """The options that keywords of `tune` mean, or that a result keeps. Raises UsageError: at once
    for a value that cannot be read, with all faults for values out of bounds or contradictory."""
    fields = SearchOptions.model_fields
    field = next((f for f in options if f not in fields and f in TrainSetting.model_fields), None)
    where = "restrict" if field in AXES else "base"
    law = f"{field} is a field of a setting, which a search varies or holds."
    refuse_if(field is not None, law, f"Write {where}={{{field!r}: …}}.")
    return parse(SearchOptions, options, "the search")


def begin_at(
    predicted: Predicted, typed: Mapping[str, Any], fixed: Mapping[str, str]
) -> dict[str, Any]:
    """The keywords of a search that begins at a predicted setting. Options that were `typed` win,
    as do fields that are `fixed` for every setting. Raises UsageError."""
    setting = predicted.setting.without_recipe(isinstance(predicted.model, SwinConfig))
    sized = typed["batch_size"] is not None or "global_batch" in typed
    share = None if sized or "accumulate" in fixed else predicted.images_per_device_step
    left_out = {*AXES, "batch_size", *({"accumulate"} if sized or share else ())}
    if "gpus" in typed or "world_size" in fixed:  # the devices are as typed
        left_out |= set(Distribution.model_fields)
    base = {**setting.model_dump(exclude=left_out), **fixed}
    if setting.optimizer_implementation in ("foreach", "fused"):
        base["optimizer"] = setting.optimizer_family
    limits = {
        "memory_bytes": predicted.memory_bytes,
        "allocator": predicted.allocator,
        "global_batch": share and share * setting.world_size,
        "start": None if predicted.shortfall else setting.model_dump(include={*AXES, "batch_size"}),
    }
    keywords = {name: value for name, value in limits.items() if value is not None}
    return {**keywords, **typed, "base": parse(TrainSetting, base, predicted.source)}
