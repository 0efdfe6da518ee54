"""What the commands that estimate have in common: a model, its settings as a grid of rows, GPUs."""

import itertools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from planner.cli.options import OPTIONS, Fields, Request, of_schema, option, refuse_if, switch
from planner.core.errors import UsageError
from planner.core.files import MAX_RESULT_BYTES, parse_json
from planner.core.schema import Model, TrainSetting, parse
from planner.core.schema.model import MAX_SIZE
from planner.core.schema.setting import PARALLELISMS, SEVERAL, foreign_options
from planner.core.schema.validation import declared_options
from planner.core.units import parse_bytes, parse_seconds
from planner.estimation.arguments import Target, split_images
from planner.machine.hardware import Gpu, all_gpus, find_gpu
from planner.machine.hardware.fabric import find_fabric, usual_link
from planner.memory import allocator_config
from planner.throughput.result import TrainingLength, read_length

TypedRow = dict[str, str]
RECORDING, DEVICE, TRAINING = "Recording", "Device", "Whole training"  # headings of --help


class Costed(Request):
    """The length of a whole training, which its hours need."""

    epochs: float | None = option("Predict the hours of N epochs.", "N", TRAINING)
    images_per_epoch: int | None = option("By default ImageNet-1k's.", "N", TRAINING)

    def training_length(self, gpu: Gpu | None) -> TrainingLength | None:
        """The length; None if neither option was given. Raises UsageError."""
        return read_length(self.epochs, self.images_per_epoch, gpu)


class OnDevice(Request):
    """The GPU, its memory and allocator, and the link to other GPUs."""

    gpu: str | None = option(
        "A GPU of 'planner gpus'; or several, or all.", "NAME[,NAME…]", DEVICE, values="gpus"
    )
    memory: str | None = option("Memory to fit into: 24GiB, 24GB.", "SIZE", DEVICE)
    allocator: str | None = option("Used in place of PYTORCH_CUDA_ALLOC_CONF.", "OPTIONS", DEVICE)
    link: str | None = option("What joins GPUs, then machines: nvlink-a100,8xib-hdr; or 25GB/s.",
                              "L[,L]", SEVERAL, values="links")  # fmt: skip
    global_batch: int | None = option("Images of an optimizer step, on all GPUs.", "N", SEVERAL,
                                      bounds=(1, MAX_SIZE))  # fmt: skip


class Rows(OnDevice):
    """The rows that `planner estimate` and `planner report` estimate."""

    fields: Fields = of_schema()
    recorded: bool = switch("Record torch's own step, once: compiled, for minutes.", "--record",
                            RECORDING)  # fmt: skip

    def __post_init__(self) -> None:
        _ = self.gpus, self.memory_bytes, self.allocator_options  # so that their errors come first

    @property
    def typed(self) -> dict[str, object]:
        """The typed values by their options."""
        options = declared_options(type(self)).items()
        values = {spec.flag_of(name): getattr(self, name) for name, spec in options}
        return {**values, **dict.fromkeys(self.fields.flags, True)}

    def refuse(self, reason: str, refused: Mapping[str, str]) -> None:
        """Raise UsageError for options that have no effect with `reason`: no option is ignored."""
        faults = [f"  {name}: {law}" for name, law in refused.items() if self.typed.get(name)]
        law = f"{reason} does not go with these options:"
        refuse_if(faults, "\n".join([law, *faults]), "Omit them.")

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs of --gpu: several joined by commas, or all of them. Raises UsageError."""
        names = split_values(self.gpu) if self.gpu else []
        if "all" in map(str.casefold, names):
            return all_gpus()
        return tuple(gpu for gpu in map(parse_gpu, names) if gpu)

    @property
    def only_gpu(self) -> Gpu | None:
        """The GPU, if one was named."""
        return self.gpus[0] if len(self.gpus) == 1 else None

    def target(self, gpu: Gpu | None) -> Target:
        """What the options say of a device, which is `gpu`."""
        return Target(gpu, self.memory_bytes, self.allocator_options, self.link, self.recorded)

    @cached_property
    def memory_bytes(self) -> int | None:
        """The memory to fit into. Raises UsageError."""
        return None if self.memory is None else parse_bytes(self.memory)

    @cached_property
    def allocator_options(self) -> allocator_config.AllocatorConfig | None:
        """The options of the caching allocator: those given, or those in the environment."""
        if self.allocator is None:
            return allocator_config.environment_allocator(os.environ)
        config = allocator_config.parse_allocator_config(self.allocator)
        return replace(config, source=f"--allocator {self.allocator}")


def read_settings(
    text: str, typed: Fields, defaults: Mapping[str, str], global_batch: int | None = None
) -> tuple[Model, list[TrainSetting]]:
    """The model that `text` and the options mean, and a setting for every combination of values.

    `defaults` are the values, as text, of fields that were not typed. Raises UsageError with all
    faults, in the words that were typed.
    """
    from planner.libraries.names import resolve_model

    values_typed = {**defaults, **typed.setting}
    axes = {
        field: split_values(values_typed.pop(field))
        for field in sorted(declared_options(TrainSetting), key=lambda f: f != "parallelism")
        if field in values_typed
    }
    rows = [
        {**values_typed, **dict(zip(axes, values, strict=True))}
        for values in itertools.product(*axes.values())
    ]
    if global_batch or any(field in typed.setting for field in ("world_size", "parallelism")):
        rows = _spread_rows(rows, global_batch)
    settings = [parse(TrainSetting, row, "the setting") for row in rows]
    return resolve_model(text, typed.model), settings


def one_setting(text: str, typed: Fields, precision: str, topic: str) -> tuple[Model, TrainSetting]:
    """The model, and the only setting, as `topic` needs one. Raises UsageError."""
    refuse_several(typed, topic)
    model, settings = read_settings(text, typed, {"precision": precision})
    return model, settings[0]


def refuse_several(typed: Fields, topic: str, gpu: str | None = None) -> None:
    """Raise UsageError for options that have several values, as `topic` needs one setting."""
    texts = {OPTIONS[n].flag_of(n): text for n, text in typed.setting.items() if n in OPTIONS}
    named = {**texts, "--gpu": gpu or ""}.items()
    several = [f"{n} {text}" for n, text in named if len(split_values(text)) > 1 or text == "all"]
    law = f"{topic} is for one setting, not for {' and '.join(several)}."
    refuse_if(several, law, "Give each option one value: 'planner estimate' compares several.")


def _spread_rows(rows: Sequence[TypedRow], global_batch: int | None) -> list[TypedRow]:
    """Complete the rows by their number of devices. Several devices without a parallelism run ddp;
    if there are several counts, a single device runs without one. Each row gets only the options of
    its own parallelism, and its share of a step's images. Raises UsageError."""
    counts = {typed_row.get("world_size", "1") for typed_row in rows}
    kinds = {typed_row.get("parallelism", "") for typed_row in rows}
    result: list[TypedRow] = []
    for typed_row in rows:
        row = dict(typed_row)
        if row.get("world_size", "1") != "1":
            row.setdefault("parallelism", "ddp")
        elif len(counts) > 1:
            row |= {"parallelism": "none", "nodes": "1"}
        kind = row.get("parallelism", "none")
        if kind in PARALLELISMS and (len(counts) > 1 or len(kinds) > 1):
            row = {f: value for f, value in row.items() if f not in foreign_options(kind)}
        if global_batch is not None:
            fields = {f: text for f, text in row.items() if f in ("world_size", "accumulate")}
            devices = parse(TrainSetting, fields, "the setting")
            counted = devices.world_size, devices.accumulate
            row["batch_size"] = str(split_images(global_batch, *counted, "batch_size" in row))
        if row not in result:
            result.append(row)
    return result


def split_values(text: str) -> list[str]:
    """The values of a text: `none,blocks,stages:0,1` has three, as a number after a chosen stage
    is another stage."""
    values: list[str] = []
    for part in (p.strip() for p in text.split(",")):
        if values and re.match(r"stages:\d", values[-1]) and part.isdigit():
            values[-1] += f",{part}"
        elif part:
            values.append(part)
    return values or [text]


def check_link(text: str | None, settings: Sequence[TrainSetting], gpu: Gpu | None) -> None:
    """Raise UsageError for a link that joins nothing or is impossible; and without a link, for a
    GPU that has no usual one."""
    if text is None:
        if gpu is not None and any(setting.devices_per_node > 1 for setting in settings):
            usual_link(gpu)
        return
    refuse_if(gpu is None, "--link is for time, which needs a GPU.", "Name one with --gpu.")
    is_alone = all(setting.world_size == 1 for setting in settings)
    law = f"--link {text} joins several GPUs, and there is one."
    refuse_if(is_alone, law, "Say how many with --gpus.")
    for setting in settings:
        find_fabric(gpu, setting.nodes, text, setting.devices_per_node)


def parse_gpu(name: str | None) -> Gpu | None:
    """The GPU of --gpu, for commands that also accept --memory instead. Raises UsageError."""
    try:
        return None if name is None else find_gpu(name)
    except UsageError as error:
        way_out = f"{error.way_out.removesuffix('.')}, or pass --memory 80GiB."
        raise UsageError(error.message, way_out) from None


def read_piped(path: str) -> Any:
    """The JSON on standard input if `path` is `-`, else `path` itself. Raises UsageError."""
    if path != "-":
        return path
    way_out = "Write for example 'planner advise MODEL --gpu NAME --json | planner emit - …'."
    refuse_if(sys.stdin.isatty(), "- is standard input, and nothing is piped into it.", way_out)
    text = sys.stdin.buffer.read(MAX_RESULT_BYTES).decode("utf-8-sig", errors="replace")
    return parse_json(text, "standard input")


def read_duration(option: str, text: str) -> float:
    """The seconds of a duration, more than 0. Raises UsageError."""
    seconds = parse_seconds(text)
    refuse_if(seconds <= 0, f"{option} {text} is no time to run in.", "Write 90s, 10m or 1h30m.")
    return seconds
