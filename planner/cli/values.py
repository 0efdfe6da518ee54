"""What a shell may complete a value to: by the name of the parameter, for every command alike.

Nothing here imports torch or a model's library. A value that the next key continues ends in one of
CONTINUED: a library's name and its colon, a field and its equals sign, a folder and its slash.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click
from click.shell_completion import CompletionItem

from planner.errors import PlannerError
from planner.files import DATA_RESULT, STUDY, TUNE_PROBES, TUNE_RESULT

CONTINUED = (":", "=", "/")
CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
# What the folder of a search, or of a loader's, holds.
RUN_FILES = (TUNE_RESULT, TUNE_PROBES, STUDY, DATA_RESULT)

Completer = Callable[[click.Context, str], Iterable[CompletionItem | str]]


def complete_value(
    parameter: click.Parameter, ctx: click.Context, incomplete: str
) -> list[CompletionItem] | None:
    """What `incomplete` may become as a value of `parameter`; None where nothing is known of it."""
    completer = VALUES.get(parameter.name or "")
    if completer is None:
        return None
    try:
        found = list(completer(ctx, incomplete))
    except (PlannerError, OSError, ValueError):  # what cannot be read completes to nothing
        return []
    return [item if isinstance(item, CompletionItem) else CompletionItem(item) for item in found]


def _one_of(values: Callable[[], Iterable[str]]) -> Completer:
    return lambda _, incomplete: (v for v in values() if v.startswith(incomplete))


def _several_of(values: Callable[[], Iterable[str]]) -> Completer:
    """Of a list with commas: the last of its values, and none twice."""

    def complete(_: click.Context, incomplete: str) -> Iterator[str]:
        before, comma, last = incomplete.rpartition(",")
        given = before.split(",")
        yield from (
            f"{before}{comma}{value}"
            for value in values()
            if value.startswith(last) and value not in given
        )

    return complete


def _listed(module: str, name: str) -> Callable[[], Iterable[str]]:
    """The names that a module of ours lists; it is imported when a shell asks."""
    return lambda: getattr(importlib.import_module(f"planner.{module}"), name)


def _file(_: click.Context, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]  # the shell knows best


def _folder(_: click.Context, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="dir")]


def _entries(incomplete: str, suffixes: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Folders, and files of these suffixes, as they are typed; hidden ones only where asked for."""
    before, slash, name = incomplete.rpartition("/")
    for path in sorted(Path(before + slash or ".").expanduser().iterdir()):
        if not path.name.startswith(name) or (path.name[0] == "." and not name):
            continue
        if path.is_dir() or path.name.endswith(tuple(suffixes)):
            yield f"{before}{slash}{path.name}", path


def _models(_: click.Context, incomplete: str) -> Iterator[CompletionItem | str]:
    """LIBRARY: and then its names; a name by itself; a file."""
    from planner.libraries.registry import SPECS

    library, colon, _name = incomplete.partition(":")
    if colon:
        published = SPECS[library].published if library in SPECS else ()
        yield from (m for n in published if (m := f"{library}:{n}").startswith(incomplete))
        return
    yield from (f"{name}:" for name in SPECS if name.startswith(incomplete))
    if incomplete:
        names = (name for spec in SPECS.values() for name in spec.published)
        yield from dict.fromkeys(name for name in names if name.startswith(incomplete))
    for typed, path in _entries(incomplete, CONFIG_SUFFIXES):
        yield f"{typed}/" if path.is_dir() else typed


def _runs(
    _: click.Context, incomplete: str, suffixes: Sequence[str] = (".json",)
) -> Iterator[CompletionItem | str]:
    """Folders of searches, the folders on the way to them, and results by themselves."""
    for typed, path in _entries(incomplete, suffixes):
        if not path.is_dir():
            yield typed
        elif any((path / name).is_file() for name in RUN_FILES):
            yield CompletionItem(typed, help="a run")
        else:
            yield f"{typed}/"


def _runs_or_models(ctx: click.Context, incomplete: str) -> Iterator[CompletionItem | str]:
    """Of `report` also files of records and studies, which it draws by themselves."""
    suffixes = (".json", ".jsonl", ".journal") if ctx.info_name == "report" else (".json",)
    seen = set()
    for item in (*_runs(ctx, incomplete, suffixes), *_models(ctx, incomplete)):
        value = item if isinstance(item, str) else item.value
        if value.rstrip("/") not in seen:
            seen.add(value.rstrip("/"))
            yield item


def _gpus() -> Iterator[str]:
    from planner.hardware.catalogue import all_gpus

    yield from (gpu.name for gpu in all_gpus())


def _gpus_to_rank() -> Iterator[str]:
    yield "all"
    yield from _gpus()


def _gpu(ctx: click.Context, incomplete: str) -> Iterable[CompletionItem | str]:
    """`report` takes several, and it and `estimate` take all."""
    if "," in incomplete and ctx.info_name == "report":
        return _several_of(_gpus)(ctx, incomplete)
    known = _gpus_to_rank if ctx.info_name in ("estimate", "report") else _gpus
    return _one_of(known)(ctx, incomplete)


def _link(_: click.Context, incomplete: str) -> Iterator[str]:
    """`nvlink-a100,8xib-hdr`: the link within a machine, then cards of the network between."""
    from planner.hardware.links import read_catalogue

    before, comma, last = incomplete.rpartition(",")
    cards = re.match(r"\d+x", last) if comma else None
    start = cards.group() if cards else ""
    for entry in read_catalogue()["links"]:
        name = start + str(entry["name"])
        if name.startswith(last):
            yield f"{before}{comma}{name}"
    if not comma:
        yield from (
            f"{typed}/" if path.is_dir() else typed
            for typed, path in _entries(incomplete, (".json",))
        )


def _devices() -> Iterator[str]:
    yield from ("auto", "cpu", "cuda")
    numbers = (path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))
    yield from (f"cuda:{number}" for number in sorted(numbers, key=int))


def _optimizers() -> Iterator[str]:
    from planner.schema.setting import FUSED_FAMILIES, IMPLEMENTATIONS, OPTIMIZER_FAMILIES

    for family in OPTIMIZER_FAMILIES:
        yield family
        for implementation in IMPLEMENTATIONS:
            if implementation != "-fused" or family in FUSED_FAMILIES:
                yield family + implementation
    yield "adamw-8bit"


def _strategies(ctx: click.Context, incomplete: str) -> Iterator[str]:
    from search.loader.options import STRATEGIES as LOADER_STRATEGIES
    from search.strategies.named import STRATEGIES

    known = LOADER_STRATEGIES if ctx.info_name == "data" else STRATEGIES
    yield from (name for name in known if name.startswith(incomplete))


def _setting_fields() -> Mapping[str, Any]:
    from planner.schema import TrainSetting

    return TrainSetting.model_fields


def _all_fields() -> dict[str, Any]:
    from planner.schema import FactoryModel, NamedModel, SwinConfig

    models = (FactoryModel, NamedModel, SwinConfig)
    of_models = {name: field for model in models for name, field in model.model_fields.items()}
    return {**of_models, **_setting_fields()}


def _assignment(known: Callable[[], Mapping[str, Any]]) -> Completer:
    """FIELD= of these fields, and then its values where they are a choice."""

    def complete(ctx: click.Context, incomplete: str) -> Iterator[CompletionItem | str]:
        fields = known()
        name, equals, value = incomplete.partition("=")
        if not equals:
            yield from (f"{field}=" for field in fields if field.startswith(name))
            return
        completer = VALUES[name] if name in _TYPED else None
        if completer is None:
            choices = _choices(fields[name].annotation) if name in fields else ()
            listed = _several_of if ctx.info_name == "tune" else _one_of
            completer = listed(lambda: choices)
        for item in completer(ctx, value):
            yield f"{name}={item.value if isinstance(item, CompletionItem) else item}"

    return complete


def _choices(annotation: Any) -> tuple[str, ...]:
    """The values of a field that has few."""
    if annotation is bool:
        return ("true", "false")
    if get_origin(annotation) is Literal:
        return tuple(map(str, get_args(annotation)))
    return ()


def _kept() -> Iterator[str]:
    from planner.advice.levers import EFFECTS

    yield from EFFECTS
    yield from _setting_fields()


def _commands(ctx: click.Context, incomplete: str) -> Iterable[CompletionItem | str]:
    from planner.cli.help import complete_command

    return complete_command(ctx, incomplete)


def _libraries(ctx: click.Context, incomplete: str) -> Iterable[CompletionItem | str]:
    from planner.schema.model import LIBRARIES

    several = ctx.info_name == "attention"
    return (_several_of if several else _one_of)(lambda: LIBRARIES)(ctx, incomplete)


# Fields whose values are texts of a form of their own.
_TYPED = ("checkpointing", "optimizer")
VALUES: Mapping[str, Completer] = {
    "model": _models,
    "models": _models,
    "target": _runs_or_models,
    "targets": _runs_or_models,
    "result": _runs,
    "plan": _runs,
    "with_data": _runs,
    "precision": _several_of(_listed("schema.setting", "PRECISIONS")),
    "checkpointing": _several_of(_listed("schema.setting", "CHECKPOINTINGS")),
    "compile": _several_of(_listed("schema.setting", "COMPILE_MODES")),
    "attention": _several_of(_listed("schema.setting", "ATTENTIONS")),
    "optimizer": _several_of(_optimizers),
    "parallelism": _several_of(_listed("schema.distribution", "PARALLELISMS")),
    "fields": _assignment(_all_fields),
    "changes": _assignment(_setting_fields),
    "link": _link,
    "gpu": _gpu,
    "name": _one_of(_gpus),
    "device": _one_of(_devices),
    "strategy": _strategies,
    "trainer": _one_of(_listed("trainers.registry", "TARGETS")),
    "keep": _several_of(_kept),
    "allow": _several_of(_listed("advice.wish", "ALLOWED")),
    "pipelines": _several_of(_listed("schema.loading", "PIPELINES")),
    "library": _libraries,
    "path": _several_of(_listed("schema.bench", "PATHS")),
    "swin": _several_of(_listed("cli.bench", "SWINS")),
    "windows": _several_of(_listed("cli.bench", "SHIFTS")),
    "shapes": _several_of(_listed("cli.bench", "SHAPES")),
    "data": _folder,
    "folder": _folder,
    "tensorboard": _folder,
    "command": _commands,
    "shell": _one_of(_listed("cli.completion", "SHELLS")),
    **dict.fromkeys(
        ("source", "files", "plot", "output", "matrix", "record", "replay", "published", "compare"),
        _file,
    ),
}
