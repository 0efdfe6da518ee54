"""The flags of a search, from the class that declares its options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import click

from search.loop.options import Option, declared_options, flag_of


def search_flags(kind: type[Any]) -> Iterator[Callable[[Any], Any]]:
    """The flags of `SearchOptions` or a class like it, whose defaults are declared there."""
    for name, option in declared_options(kind).items():
        if option.text:
            yield click.option(
                flag_of(name, option), type=_kind(name, option), metavar=option.metavar,
                is_flag=option.is_switch, default=option.shown or None, help=option.text,
                show_default=bool(option.shown),
            )  # fmt: skip


def _kind(name: str, option: Option) -> click.ParamType[Any] | None:
    if option.bounds is not None:
        return click.IntRange(option.bounds[0])
    return click.FloatRange(0, min_open=True) if name == "epochs" else None


def said_options(kind: type[Any], given: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The options of the search that were typed, as keywords."""
    for name, option in declared_options(kind).items():
        value = given.get(flag_of(name, option)[2:].replace("-", "_"))
        if value is None or not option.text:
            continue
        if option.typed is not None:
            value = option.typed(value)
        if option.is_switch:
            value = not getattr(kind, name)
        yield name, value
