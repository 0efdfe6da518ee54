"""What a shell may complete a value to: by the name of the parameter, for every command alike.

Nothing here imports torch or a model's library.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

import click
from click.shell_completion import CompletionItem

from planner.core.errors import PlannerError

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
    except PlannerError:  # a name that is none completes to nothing
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


def _models(ctx: click.Context, incomplete: str) -> Sequence[CompletionItem | str]:
    """LIBRARY:NAME, or else a file or a folder."""
    from planner.libraries.registry import SPECS

    names = [f"{library}:{name}" for library, spec in SPECS.items() for name in spec.published]
    return [n for n in names if n.startswith(incomplete)] or _file(ctx, incomplete)


def _gpus() -> Iterator[str]:
    from planner.machine.hardware.catalogue import all_gpus

    yield from (gpu.name for gpu in all_gpus())


def _links() -> Iterator[str]:
    from planner.machine.hardware.links import read_catalogue

    yield from (str(entry["name"]) for entry in read_catalogue()["links"])


def _setting_fields() -> Mapping[str, Any]:
    from planner.core.schema import TrainSetting

    return TrainSetting.model_fields


def _all_fields() -> dict[str, Any]:
    from planner.core.schema import FactoryModel, NamedModel, SwinConfig

    models = (FactoryModel, NamedModel, SwinConfig)
    of_models = {name: field for model in models for name, field in model.model_fields.items()}
    return {**of_models, **_setting_fields()}


def _assignment(known: Callable[[], Mapping[str, Any]]) -> Completer:
    """FIELD=VALUE of these fields, where their values are few, and else FIELD=."""

    def complete(_: click.Context, incomplete: str) -> Iterator[str]:
        for name, field in known().items():
            for value in _choices(field.annotation) or ("",):
                if f"{name}={value}".startswith(incomplete):
                    yield f"{name}={value}"

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


VALUES: Mapping[str, Completer] = {
    "model": _models,
    "models": _models,
    "target": _models,
    "targets": _models,
    "precision": _several_of(_listed("core.schema.setting", "PRECISIONS")),
    "checkpointing": _several_of(_listed("core.schema.setting", "CHECKPOINTINGS")),
    "compile": _several_of(_listed("core.schema.setting", "COMPILE_MODES")),
    "attention": _several_of(_listed("core.schema.setting", "ATTENTIONS")),
    "optimizer": _several_of(_listed("core.schema.setting", "OPTIMIZER_FAMILIES")),
    "parallelism": _several_of(_listed("core.schema.distribution", "PARALLELISMS")),
    "fields": _assignment(_all_fields),
    "changes": _assignment(_setting_fields),
    "link": _one_of(_links),
    "gpu": _several_of(_gpus),
    "name": _one_of(_gpus),
    "device": _one_of(lambda: ("auto", "cpu", "cuda")),
    "trainer": _one_of(_listed("trainers.registry", "TARGETS")),
    "keep": _several_of(_kept),
    "allow": _several_of(_listed("advice.wish", "ALLOWED")),
    "library": _several_of(_listed("core.schema.model", "LIBRARIES")),
    "data": _folder,
    **dict.fromkeys(("source", "files", "output", "replay", "compare", "result", "plan"), _file),
}
