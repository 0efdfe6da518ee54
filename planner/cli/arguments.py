"""How a model, its settings and a memory are written on a command line."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from planner.core.errors import UsageError, alternatives, shorten
from planner.core.files import MAX_RESULT_BYTES, parse_json
from planner.core.schema import Model, TrainSetting, parse
from planner.core.schema.distribution import PARALLELISMS
from planner.core.schema.setting import ATTENTIONS, CHECKPOINTINGS, COMPILE_MODES, PRECISIONS
from planner.core.units import parse_seconds
from planner.estimation.arguments import MODEL_FIELDS, unknown_field

if TYPE_CHECKING:
    from planner.machine.hardware import Gpu

# command-line option -> field, of the model and of the setting
MODEL_OPTIONS = {
    "image_size": "image_size", "num_classes": "num_classes", "drop_path": "drop_path_rate",
}  # fmt: skip
GRID_FIELDS = (
    "batch_size", "accumulate", "precision", "checkpointing", "compile", "attention", "optimizer",
)  # fmt: skip
# Those whose field has another name, or that --set takes too.
SEVERAL_OPTIONS = {"gpus": "world_size", "nodes": "nodes", "parallelism": "parallelism"}

MODEL_FLAGS: list[Callable[[Any], Any]] = [
    click.option("--image-size", metavar="PX", help="In pixels: 384, or 256,192 (height, width)."),
    click.option("--num-classes", metavar="N", help="Number of classes (default: the model's)."),
    click.option("--drop-path", metavar="RATE", help="Stochastic depth (default: the model's)."),
    click.option("--set", "fields", multiple=True, metavar="FIELD=VALUE",
                 help="Any field of the model or of the setting; may be repeated."),
]  # fmt: skip
detail_flag = click.option(
    "--detail", is_flag=True, help="Print all of the answer, not only its first screen."
)
way_flag = click.option(
    "--way", type=click.IntRange(1), metavar="N",
    help="Which way of an advice (default: the recommended), or which of several estimates.",
)  # fmt: skip
# Each axis: the letter that stands for a value, what the values are, what it is by default.
_AXES = {
    "precision": ("P", alternatives(PRECISIONS), "bf16; fp16 on a GPU without it"),
    "checkpointing": ("C", alternatives(CHECKPOINTINGS), "none"),
    "compile": ("C", alternatives(COMPILE_MODES), "off"),
    "attention": ("A", alternatives(ATTENTIONS), "the library's own"),
    "optimizer": ("O", "adamw, adam, sgd, … and -foreach, -fused, -forloop", "adamw"),
}


def axis_flags(searched: bool = False) -> list[Callable[[Any], Any]]:
    """The options of a setting's axes: `searched` among the values given, or one row for each."""
    return [
        click.option(
            f"--{axis}",
            metavar=f"{letter}[,{letter}…]",
            multiple=searched and axis == "checkpointing",
            help=f"Search only these: {values}." if searched else f"{values} (default: {default}).",
        )
        for axis, (letter, values, default) in _AXES.items()
    ]


_OPTIONS: list[Callable[[Any], Any]] = [
    click.option(
        "--batch-size", metavar="N[,N…]", help="Images in a device's micro-batch (default: 64)."
    ),
    click.option("--accumulate", metavar="N[,N…]", help="Micro-batches per step (default: 1)."),
    *axis_flags(),
    *MODEL_FLAGS,
]


# What a whole training is, for its hours and its price.
_COST_FLAGS: list[Callable[[Any], Any]] = [
    click.option("--epochs", type=float, metavar="N", help="Predict the hours of N epochs."),
    click.option("--images-per-epoch", type=int, metavar="N",
                 help="Images in an epoch (default: ImageNet-1k's)."),
    click.option("--price-per-hour", type=float, metavar="X",
                 help="Price of one GPU, in any currency: predict the cost too."),
]  # fmt: skip


Command = Callable[..., Any]


def with_options(options: Sequence[Callable[[Any], Any]]) -> Callable[[Command], Command]:
    """A decorator of a click command that also takes `options`, listed by --help in their order."""

    def decorated(function: Command) -> Command:
        for option in reversed(options):
            function = option(function)
        return function

    return decorated


with_cost_options = with_options(_COST_FLAGS)
with_model_options = with_options(_OPTIONS)  # what describes a model and its settings
# What describes how a training is spread over devices: of the wish of `advise`, and of rows.
SEVERAL_FLAGS: list[Callable[[Any], Any]] = [
    click.option("--gpus", metavar="N[,N…]", help="GPUs in all (default: 1)."),
    click.option("--nodes", metavar="M", help="Machines that hold them (default: 1)."),
    click.option("--parallelism", metavar="P[,P…]",
                 help=f"{alternatives(PARALLELISMS[1:])} (default on several GPUs: ddp)."),
    click.option("--link", metavar="L[,L]",
                 help="What joins GPUs, then machines: nvlink-a100,8xib-hdr; or a measured FILE."),
]  # fmt: skip
with_several_options = with_options(
    [
        *SEVERAL_FLAGS,
        click.option(
            "--global-batch", metavar="N", help="Images in a step, shared equally by the GPUs."
        ),
    ]
)


def model_and_settings(
    text: str, given: Mapping[str, Any], defaults: Mapping[str, str] | None = None
) -> tuple[Model, list[TrainSetting]]:
    """The model that `text` and the options mean, and every combination of the settings' values.

    `defaults` are the values of fields that nobody named, as they would be typed.
    Raises UsageError with all faults, in the words that were typed.
    """
    from planner.libraries.resolve import resolve_model

    of_model, of_setting = given_fields(given, (*GRID_FIELDS, *SEVERAL_OPTIONS))
    of_setting = {**(defaults or {}), **of_setting}
    grid = ("parallelism", "world_size", *GRID_FIELDS)
    axes = {field: split_values(of_setting.pop(field)) for field in grid if field in of_setting}
    rows = [
        {**of_setting, **dict(zip(axes, values, strict=True))}
        for values in itertools.product(*axes.values())
    ]
    if any(given.get(option) for option in (*SEVERAL_OPTIONS, "global_batch")):
        from planner.cli.several import check_counts, spread_rows

        for row in rows:
            check_counts(row)
        if given.get("gpus") or given.get("parallelism") or given.get("global_batch"):
            rows = spread_rows(rows, given.get("global_batch"))
    settings = [parse(TrainSetting, row, "the setting") for row in rows]
    return resolve_model(text, of_model), settings


def given_fields(
    given: Mapping[str, Any], of_setting_options: Iterable[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """What options and --set say of the model and of the setting, each field once.

    Raises UsageError: an unknown field, one that is given twice, an option without a value.
    """
    refuse_empty(given)
    of_model, of_setting = split_fields(given.get("fields") or ())
    options = [(option, field, of_model) for option, field in MODEL_OPTIONS.items()]
    options += [(o, SEVERAL_OPTIONS.get(o, o), of_setting) for o in of_setting_options]
    for option, field, fields in options:
        written = given.get(option)
        if written is None or written == ():
            continue
        if field in fields:
            raise UsageError(
                f"{field} is given twice: by --{option.replace('_', '-')} and by --set.",
                "Omit one of them.",
            )
        fields[field] = ",".join(written) if isinstance(written, tuple) else str(written)
    return of_model, of_setting


def split_fields(fields: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """`FIELD=VALUE`s as those of the model and those of the setting. Raises UsageError."""
    of_model: dict[str, str] = {}
    of_setting: dict[str, str] = {}
    for entry in fields:
        field, equals, value = entry.partition("=")
        field, value = field.strip().replace("-", "_"), value.strip()
        if not equals:
            raise UsageError(
                f"--set takes FIELD=VALUE, and {shorten(entry)} has no '='.",
                "For example --set embed_dim=64.",
            )
        if field in of_model or field in of_setting:
            raise UsageError(f"--set {field} is given twice.", "Omit one of them.")
        if field in TrainSetting.model_fields:
            of_setting[field] = value
        elif field in MODEL_FIELDS:
            of_model[field] = value
        else:
            raise unknown_field(field, value, "--set ")
        if not value:
            raise UsageError(f"--set {field} has no value.", EMPTY)
    return of_model, of_setting


EMPTY = "Give it a value (is a shell variable unset?), or omit it."
# How parameters are typed that are not typed as they are named.
_SHOWN = {
    "fields": "--set", "compile_": "--compile", "model": "MODEL", "result": "RESULT",
    "target": "RUN|MODEL", "files": "FILE",
}  # fmt: skip


def refuse_empty(given: Mapping[str, Any]) -> None:
    """Raises UsageError for an option whose value is empty: left out it would mean something
    other than what was asked."""
    for option, value in given.items():
        values = value if isinstance(value, tuple) else (value,)
        if any(isinstance(v, str) and not v.replace(",", " ").strip() for v in values):
            name = _SHOWN.get(option, f"--{option.replace('_', '-')}")
            raise UsageError(f"{name} has no value.", EMPTY)


def read_piped(path: str) -> Any:
    """The JSON on standard input, where `path` is `-`; else `path`. Raises UsageError."""
    if path != "-":
        return path
    if sys.stdin.isatty():
        raise UsageError(
            "- is standard input, and nothing is piped into it.",
            "Write for example 'planner advise MODEL --gpu NAME --json | planner emit - …'.",
        )
    text = sys.stdin.buffer.read(MAX_RESULT_BYTES).decode("utf-8-sig", errors="replace")
    return parse_json(text, "standard input")


def read_duration(option: str, text: str) -> float:
    """The seconds for which something may run, more than none. Raises UsageError."""
    seconds = parse_seconds(text)
    if seconds <= 0:
        raise UsageError(f"{option} {text} is no time to run in.", "Write 90s, 10m or 1h30m.")
    return seconds


def read_gpu_option(name: str | None) -> Gpu | None:
    """The GPU of --gpu, for commands that take --memory in its place. Raises UsageError."""
    from planner.machine.hardware import find_gpu

    try:
        return None if name is None else find_gpu(name)
    except UsageError as error:
        way_out = f"{error.way_out.removesuffix('.')}, or pass --memory 80GiB."
        raise UsageError(error.message, way_out) from None


def read_gpus_option(names: str | None) -> tuple[Gpu, ...]:
    """The GPUs of --gpu: several with commas between, all for `all`. Raises UsageError."""
    from planner.machine.hardware import all_gpus

    several = split_values(names) if names else []
    if "all" not in map(str.casefold, several):
        return tuple(gpu for gpu in map(read_gpu_option, several) if gpu)
    if len(several) > 1:
        raise UsageError("--gpu all names every GPU by itself.", "Omit the others, or all.")
    return all_gpus()


def split_values(text: str) -> list[str]:
    """`none,blocks,stages:0,1` as its three values: a number after a chosen stage is one more."""
    values: list[str] = []
    for part in (p.strip() for p in text.split(",")):
        if values and re.match(r"stages:\d", values[-1]) and part.isdigit():
            values[-1] += f",{part}"
        elif part:
            values.append(part)
    return values or [text]
