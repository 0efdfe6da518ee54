"""How a field is said on a command line: declared once, where the field is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel


@dataclass(frozen=True)
class Option:
    """What a field's option says and takes: `Annotated[int, Option("Micro-batches per step.")]`.

    `text` explains it (a dataclass's field without one has no option); `metavar` stands for its
    value, `heading` is where --help lists it; `flag` is what is typed, where that is not the
    field's name, and `also` a second spelling or a letter (`-q`). `shown` is said in place of the
    field's own default. `values` are those that a shell completes, or the name of a list of them; a
    field's Literal says them by itself. A whole number is held to `bounds`.
    A search has more: `typed` makes a value of what was typed and `written` is its inverse, `read`
    makes one of what Python was given; that of a bool turns its default around.
    """

    text: str = ""
    metavar: str = ""
    heading: str = "Setting"
    flag: str = ""
    also: str = ""
    shown: str = ""
    values: tuple[str, ...] | str = ()
    bounds: tuple[int, int] | None = None
    typed: Callable[[str], Any] | None = None
    written: Callable[[Any], str] = str
    read: Callable[[Any], Any] | None = None
    is_argument: bool = False

    def flag_of(self, name: str) -> str:
        """What is typed for the option of a field: `--batch-size`."""
        return self.flag or f"--{name.replace('_', '-')}"


def option(
    *said: str, default: Any = None, typed: Callable[[str], Any] | None = None, **how: Any
) -> Any:
    """A field of a dataclass with an option. A default that is written as it would be typed is read
    so."""
    if typed is not None:
        how, default = {"shown": default, "typed": typed, **how}, typed(default)
    metadata = {"option": Option(*said, **how)}  # type: ignore[arg-type]
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def switch(text: str, flag: str = "", heading: str = "Output", **how: Any) -> Any:
    """The same of a field that is False until its option is typed."""
    return option(text, "", heading, flag, default=False, **how)


def declared_options(kind: type[Any]) -> Mapping[str, Option]:
    """The options of a class's fields, a pydantic model's or a dataclass's, by the field's name."""
    if issubclass(kind, BaseModel):
        said = {name: field.metadata for name, field in kind.model_fields.items()}
        return {n: m for n, found in said.items() for m in found if isinstance(m, Option)}
    own = {f.name: f.metadata.get("option") for f in dataclasses.fields(kind)}
    return {name: found for name, found in own.items() if found is not None}
