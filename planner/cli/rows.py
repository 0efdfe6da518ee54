"""What the commands that estimate take alike: a model, its settings as rows of a grid, the GPUs."""

import itertools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from planner.cli.options import OWN, Fields, Request, of_schema, option, refuse_if, switch
from planner.core.errors import UsageError
from planner.core.files import MAX_RESULT_BYTES, parse_json
from planner.core.schema import Model, TrainSetting, parse
from planner.core.schema.model import MAX_SIZE
from planner.core.schema.setting import PARALLELISMS, SEVERAL, foreign_options
from planner.core.schema.validation import declared_options
from planner.core.units import parse_bytes, parse_seconds
from planner.estimation.arguments import share_of
from planner.machine.hardware import Gpu, all_gpus, find_gpu
from planner.machine.hardware.fabric import find_fabric, usual_link
from planner.memory import allocator_config
from planner.throughput.result import Training, read_training

Row = dict[str, str]
RECORDING = "Recording"
DEVICE, TRAINING = "Device", "Whole training"  # headings of --help


class Costed(Request):
    """What a whole training is, for its hours."""

    epochs: float | None = option("Predict the hours of N epochs.", "N", TRAINING)
    images_per_epoch: int | None = option("By default ImageNet-1k's.", "N", TRAINING)

    def training(self, gpu: Gpu | None) -> Training | None:
        """What is to be trained, None where nothing was said. Raises UsageError."""
        return read_training(self.epochs, self.images_per_epoch, gpu)


class OnDevice(Request):
    """The GPU, and what is joined to it."""

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
    """What `planner estimate` and `planner report` estimate."""

    fields: Fields = of_schema()
    recorded: bool = switch("Record torch's own step, once: compiled, for minutes.", "--record",
                            RECORDING)  # fmt: skip

    def __post_init__(self) -> None:
        _ = self.gpus, self.memory_bytes, self.config  # a mistake is told before anything is made

    @property
    def typed(self) -> dict[str, object]:
        """What was typed, by how it is typed."""
        declared = declared_options(type(self)).items()
        own = {said.flag_of(name): getattr(self, name) for name, said in declared}
        return {**own, **dict.fromkeys(self.fields.flags, True)}

    def refuse(self, together: str, refused: Mapping[str, str]) -> None:
        """Raises UsageError for options that have no effect beside others: none is ignored."""
        faults = [f"  {name}: {why}" for name, why in refused.items() if self.typed.get(name)]
        refuse_if(faults, "\n".join([f"{together} does not go with these options:", *faults]), "")

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        """Those of --gpu: several with commas between, all for `all`. Raises UsageError."""
        several = split_values(self.gpu) if self.gpu else []
        if "all" not in map(str.casefold, several):
            return tuple(gpu for gpu in map(read_gpu, several) if gpu)
        law = "--gpu all names every GPU by itself."
        refuse_if(len(several) > 1, law, "Omit the others, or all.")
        return all_gpus()

    @property
    def only_gpu(self) -> Gpu | None:
        """The one that was named."""
        return self.gpus[0] if len(self.gpus) == 1 else None

    @cached_property
    def memory_bytes(self) -> int | None:
        """What to fit into. Raises UsageError."""
        return None if self.memory is None else parse_bytes(self.memory)

    @cached_property
    def config(self) -> allocator_config.AllocatorConfig | None:
        """The caching allocator's options as given, else as torch would find them here."""
        if self.allocator is None:
            return allocator_config.environment_allocator(os.environ)
        found = allocator_config.parse_allocator_config(self.allocator)
        return replace(found, source=f"--allocator {self.allocator}")


def model_and_settings(
    text: str, typed: Fields, defaults: Mapping[str, str], global_batch: int | None = None
) -> tuple[Model, list[TrainSetting]]:
    """The model that `text` and the options mean, and every combination of the settings' values.

    `defaults` are the values of fields that nobody named, as they would be typed.
    Raises UsageError with all faults, in the words that were typed.
    """
    from planner.libraries.names import resolve_model

    of_setting = {**defaults, **typed.setting}
    axes = {
        field: split_values(of_setting.pop(field))
        for field in sorted(declared_options(TrainSetting), key=lambda f: f != "parallelism")
        if field in of_setting
    }
    rows = [
        {**of_setting, **dict(zip(axes, values, strict=True))}
        for values in itertools.product(*axes.values())
    ]
    if global_batch or any(field in typed.setting for field in ("world_size", "parallelism")):
        rows = _spread(rows, global_batch)
    settings = [parse(TrainSetting, row, "the setting") for row in rows]
    return resolve_model(text, typed.model), settings


def one_setting(text: str, typed: Fields, precision: str, what: str) -> tuple[Model, TrainSetting]:
    """The model, and the one setting that `what` is of. Raises UsageError."""
    refuse_several(typed, what)
    model, settings = model_and_settings(text, typed, {"precision": precision})
    return model, settings[0]


def refuse_several(typed: Fields, what: str, gpu: str | None = None) -> None:
    """Raises UsageError for options that have several values, where `what` is of one."""
    texts = {OWN[name].flag_of(name): said for name, said in typed.setting.items() if name in OWN}
    named = {**texts, "--gpu": gpu or ""}.items()
    several = [f"{n} {said}" for n, said in named if len(split_values(said)) > 1 or said == "all"]
    law = f"{what} is for one setting, not for {' and '.join(several)}."
    refuse_if(several, law, "Give each option one value: 'planner estimate' compares several.")


def _spread(rows: Sequence[Row], global_batch: int | None) -> list[Row]:
    """`rows` with what their number of devices means: several without a parallelism run ddp; where
    there are several counts, one device runs alone. A row has the options of its own parallelism,
    and its share of a step's images. Raises UsageError."""
    counts = {row.get("world_size", "1") for row in rows}
    kinds = {row.get("parallelism", "") for row in rows}
    found: list[Row] = []
    for row in rows:
        made = dict(row)
        if made.get("world_size", "1") != "1":
            made.setdefault("parallelism", "ddp")
        elif len(counts) > 1:
            made |= {"parallelism": "none", "nodes": "1"}
        kind = made.get("parallelism", "none")
        if kind in PARALLELISMS and (len(counts) > 1 or len(kinds) > 1):
            made = {f: value for f, value in made.items() if f not in foreign_options(kind)}
        if global_batch is not None:
            held = {f: text for f, text in made.items() if f in ("world_size", "accumulate")}
            by = parse(TrainSetting, held, "the setting")
            share = share_of(global_batch, by.world_size, by.accumulate, "batch_size" in made)
            made["batch_size"] = str(share)
        if made not in found:
            found.append(made)
    return found


def split_values(text: str) -> list[str]:
    """`none,blocks,stages:0,1` as its three values: a number after a chosen stage is one more."""
    values: list[str] = []
    for part in (p.strip() for p in text.split(",")):
        if values and re.match(r"stages:\d", values[-1]) and part.isdigit():
            values[-1] += f",{part}"
        elif part:
            values.append(part)
    return values or [text]


def check_link(text: str | None, settings: Sequence[TrainSetting], gpu: Gpu | None) -> None:
    """Raises UsageError where a link that was named joins nothing or cannot be, and where none was
    and the GPU has no usual one."""
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


def read_gpu(name: str | None) -> Gpu | None:
    """The GPU of --gpu, for commands that take --memory in its place. Raises UsageError."""
    try:
        return None if name is None else find_gpu(name)
    except UsageError as error:
        way_out = f"{error.way_out.removesuffix('.')}, or pass --memory 80GiB."
        raise UsageError(error.message, way_out) from None


def read_piped(path: str) -> Any:
    """The JSON on standard input, where `path` is `-`; else `path`. Raises UsageError."""
    if path != "-":
        return path
    way_out = "Write for example 'planner advise MODEL --gpu NAME --json | planner emit - …'."
    refuse_if(sys.stdin.isatty(), "- is standard input, and nothing is piped into it.", way_out)
    text = sys.stdin.buffer.read(MAX_RESULT_BYTES).decode("utf-8-sig", errors="replace")
    return parse_json(text, "standard input")


def read_duration(option: str, text: str) -> float:
    """The seconds for which something may run, more than none. Raises UsageError."""
    seconds = parse_seconds(text)
    refuse_if(seconds <= 0, f"{option} {text} is no time to run in.", "Write 90s, 10m or 1h30m.")
    return seconds
