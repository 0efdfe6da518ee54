"""From what a person wrote to a validated schema, or to one error that names every fault. And what
fields of schemas have in common: types of figures, faults between fields, options.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from planner.core.errors import Fault, UsageError, find_word, nearest, shorten, way_out_of

# Types of figures in a file that anybody may have written.

# A record's validator is built when it is first used: reading one is not on the way of an estimate,
# which must answer at once. Infinity and what is no number are no measurement.
RECORD_CONFIG = ConfigDict(frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False)
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # there is no more of anything
# A task's word for an item of its batch: it stands in scripts that `planner emit` writes.
UNIT = r"^[A-Za-z][A-Za-z0-9 _-]{0,39}$"


# Faults between fields, each by itself, so that one message can list them all.


class CrossFieldError(ValueError):
    """Raised by a `Checked` schema; `parse` lists its faults."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("; ".join(fault.message for fault in faults))
        self.faults = tuple(faults)


class Checked(BaseModel):
    """A schema with faults between its fields, which are raised together where each field is right
    by itself."""

    def _faults(self) -> Iterable[Fault]:
        raise NotImplementedError

    @model_validator(mode="after")
    def _without_faults(self) -> Self:
        if faults := tuple(self._faults()):
            raise CrossFieldError(faults)
        return self


# The option of a field on the command line: declared once, where the field is.


@dataclass(frozen=True)
class Option:
    """A field's option: `Annotated[int, Option("Micro-batches per step.")]`.

    - `text` explains it (a dataclass's field without one has no option).
    - `metavar` stands for its value, `heading` is where --help lists it.
    - `flag` is what is typed, where that is not the field's name; `also` is a second spelling or a
      letter (`-q`).
    - `shown` is printed in place of the field's own default.
    - `values` are those that a shell completes, or the name of a list of them; a Literal needs
      none.
    - `bounds` limit a whole number.
    """

    text: str = ""
    metavar: str = ""
    heading: str = "Setting"
    flag: str = ""
    also: str = ""
    shown: str = ""
    values: tuple[str, ...] | str = ()
    bounds: tuple[int, int] | None = None
    is_argument: bool = False

    def flag_of(self, name: str) -> str:
        """What is typed for the option of a field: `--batch-size`."""
        return self.flag or f"--{name.replace('_', '-')}"


def option(*texts: str, default: Any = None, **how: Any) -> Any:
    """A dataclass's field with an option; arguments as those of `Option`."""
    metadata = {"option": Option(*texts, **how)}  # type: ignore[arg-type]
    return dataclasses.field(default=default, metadata=metadata)


def switch(text: str, flag: str = "", heading: str = "Output", **how: Any) -> Any:
    """A dataclass's field that is False until its option is typed."""
    return option(text, "", heading, flag, default=False, **how)


def declared_options(kind: type[Any]) -> Mapping[str, Option]:
    """The options of a class's fields, a pydantic model's or a dataclass's, by the field's name."""
    if issubclass(kind, BaseModel):
        metadata = {name: field.metadata for name, field in kind.model_fields.items()}
        return {n: m for n, entries in metadata.items() for m in entries if isinstance(m, Option)}
    options = {f.name: f.metadata.get("option") for f in dataclasses.fields(kind)}
    return {name: option for name, option in options.items() if option is not None}


ModelT = TypeVar("ModelT", bound=BaseModel)
MAX_FAULTS = 20  # listed in one message
_OTHER_ARM = frozenset({"int_type", "float_type", "tuple_type", "string_type"})


def parse(schema: type[ModelT], data: Mapping[str, Any], source: str) -> ModelT:
    """`data` as a `schema`. Raises UsageError that lists all faults, in the user's field names; its
    message names the `source` ("swin.yaml", "--set")."""
    if not isinstance(data, Mapping):
        law = f"{source} must be a mapping of fields to values, not {shorten(data)}."
        raise UsageError(law, "Write a name and a value for each field.")
    data = {str(field): value for field, value in data.items()}
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        faults = list(dict.fromkeys(_faults(schema, data, error)))
    count = "one fault" if len(faults) == 1 else f"{len(faults)} faults"
    shown = faults[:MAX_FAULTS]
    lines = [f"{source} has {count}:", *(f"  {fault.message}" for fault in shown)]
    if len(faults) > MAX_FAULTS:
        lines.append(f"  and {len(faults) - MAX_FAULTS:,} more")
    raise UsageError("\n".join(lines), way_out_of(shown))


def _faults(
    schema: type[BaseModel], data: Mapping[str, Any], error: ValidationError
) -> Iterator[Fault]:
    """The faults of single fields, whose laws say what to write; then those between fields.

    pydantic looks between fields only where each is right by itself. So the faulty ones are left
    out and it is asked again; its faults about a field that was left out are dropped.
    """
    single = [entry for entry in error.errors() if _cross_field_error(entry) is None]
    at_fault = {str(entry["loc"][0]) for entry in single if entry["loc"]}
    yield from (Fault(_describe(schema, entry)) for entry in _of_likely_arm(single))
    rest = {field: value for field, value in data.items() if field not in at_fault}
    try:
        schema.model_validate(rest)
    except ValidationError as again:
        yield from (f for f in faults_between(again) if not at_fault.intersection(f.fields))


def faults_between(error: ValidationError) -> Iterable[Fault]:
    """The faults between fields in a validation error."""
    for entry in error.errors():
        cause = _cross_field_error(entry)
        if cause is not None:
            yield from cause.faults


def _cross_field_error(entry: Any) -> CrossFieldError | None:
    cause = entry.get("ctx", {}).get("error")
    return cause if isinstance(cause, CrossFieldError) else None


def _of_likely_arm(entries: list[Any]) -> Iterable[Any]:
    """A union has an error for each of its arms: that a number is no tuple is no news where the
    number is too small."""
    by_field: dict[str, list[Any]] = {}
    for entry in entries:
        by_field.setdefault(str(entry["loc"][0]) if entry["loc"] else "", []).append(entry)
    for complaints in by_field.values():
        likely = [entry for entry in complaints if entry["type"] not in _OTHER_ARM]
        yield from likely or complaints[:1]


def _describe(schema: type[BaseModel], entry: Any) -> str:
    field = ".".join(str(part)[:80] for part in entry["loc"] if not _is_union_arm(part))
    if not field.isprintable():
        field = shorten(field)
    if entry["type"] == "extra_forbidden":
        word = find_word(field)
        if word is not None:
            written = word.written(entry["input"])
            return f"{field}: no such field. It is a word of {word.source}. {written}"
        near = nearest(field, schema.model_fields)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return f"{field}: no such field.{hint}"
    message = entry["msg"].removeprefix("Value error, ")
    shown = "" if entry["type"] == "missing" else f" (got {shorten(entry['input'])})"
    return f"{field}: {message}{shown}{_in_our_words(field, entry['input'])}" if field else message


def _in_our_words(field: str, value: object) -> str:
    """What to write instead of a value, or a field, that is a word of another library."""
    of_value, of_field = find_word(value), find_word(field)
    if of_value is not None and of_value.field not in (field, None):
        of_value = None
    if of_field is not None and of_field.field is None:  # here it is one
        of_field = None
    text = value if isinstance(value, str) else shorten(value)
    word = find_word(f"{field}={text}") or of_value or of_field
    if word is None:
        return ""
    return f". {word.written(value).removesuffix('.').replace(f'Write {field}=', 'Write ')}"


def _is_union_arm(part: object) -> bool:
    """pydantic puts the arm of a union ("int", "tuple[int, ...]") into the path."""
    return isinstance(part, str) and (
        part in {"int", "str", "float", "bool", "constrained-int"} or "[" in part
    )
