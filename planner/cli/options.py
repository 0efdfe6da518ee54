"""From the fields of a class to a command: its options and --help, what a shell completes, and the
request that its function takes.

A request's fields are `option`s, `switch`es and `argument`s. One may hold what was
typed of another class's options: of the schema's (`of_schema`), of a search's (`declared`).
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import formatannotation
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, Self, TypeVar, dataclass_transform, get_args, get_origin

import click
from click.shell_completion import CompletionItem
from pydantic import BaseModel

from planner.cli import HELP_SETTINGS
from planner.core.errors import UsageError, alternatives, shorten
from planner.core.errors import refuse_if as refuse_if
from planner.core.schema import FactoryModel, NamedModel, SwinConfig, TrainSetting
from planner.core.schema.model import MAX_SIZE
from planner.core.schema.setting import SEVERAL
from planner.core.schema.validation import Option, declared_options
from planner.core.schema.validation import option as option
from planner.core.schema.validation import switch as switch
from planner.estimation.arguments import MODEL_FIELDS, unknown_field

# In the order in which --help shows them.
HEADINGS = (
    "The card", "The program", "The training", "Model", "Setting", "Device", SEVERAL,
    "Whole training", "What may change", "Data", "Search", "Study", "Recording", "Output",
)  # fmt: skip
WORLD = ("world_size", "nodes", "parallelism")  # of a setting, which one GPU has not
TO_FILE = ("FILE", "Output", "", "", "", "file")
EMPTY = "Give it a value (is a shell variable unset?), or omit it."
EXAMPLES = "\n\nExamples:\n"


class Command(click.Command):
    """A click command whose --help lists many options under headings, and ends with examples."""

    def __init__(self, name: str, run: Callable[..., Any], settings: Any, **kwargs: Any) -> None:
        text, _, examples = (inspect.getdoc(run) or "").partition(EXAMPLES)
        # Also where one is called by itself: click keeps the first help option that it made.
        settings = {**HELP_SETTINGS, **settings}
        super().__init__(name, help=text, context_settings=settings, **kwargs)
        self.examples = [line.strip() for line in examples.splitlines()]

    def invoke(self, ctx: click.Context) -> Any:
        """A fault of a field is told by its option, where that was typed."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            for flag, name in ((p.opts[0], p.name) for p in self.params if ctx.params.get(p.name)):
                error.message = re.sub(rf"(?m)^  {name}(\.\d+)*:", f"  {flag}:", error.message)
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, records in self.sections(ctx):
            with formatter.section(heading):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            for example in self.examples:
                formatter.write(f"  {example}\n")  # never wrapped: it is to be copied

    def sections(self, ctx: click.Context) -> list[tuple[str, list[tuple[str, str]]]]:
        """The options as --help shows them: (how it is written, what it does) by heading."""
        found: dict[str, Any] = {heading: [] for heading in HEADINGS}
        for one in self.get_params(ctx):
            if isinstance(one, click.Option):
                found[getattr(one, "heading", "Output")].append(one.get_help_record(ctx))
        return [(heading, records) for heading, records in found.items() if records]


class _Option(click.Option):
    heading = "Output"


class Text(click.ParamType[str]):
    """A text that is not blank, completed with `values`, of which `several` may stand with commas
    between."""

    name = "text"

    def __init__(self, values: Sequence[str] | str, several: bool = False) -> None:
        self.values, self.several = values, several

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Raises UsageError: left out it would mean something other than what was asked."""
        name = param.opts[0] if isinstance(param, click.Option) else getattr(param, "metavar", "")
        is_blank = not value.replace(",", " ").strip()
        refuse_if(is_blank, f"{name.strip('[]…')} has no value.", EMPTY)
        refuse_if(
            self.values == "models" and value.lower().endswith(".py"),
            f"{shorten(value)} is a program, not a model.",
            f"'planner emulate --gpu NAME -- python {value}' says what it needs; or name a "
            f"function in it that builds the model: {Path(value).stem}:FUNCTION.",
        )
        return value

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        before, comma, last = incomplete.rpartition(",") if self.several else ("", "", incomplete)
        known = self.values
        if isinstance(known, str):
            listed = LISTS.get(known, ())
            listed = resolve_name(listed) if isinstance(listed, str) else listed
            known = [getattr(n, "name", n) for n in (listed() if callable(listed) else listed)]
        found = [name for name in known if name.startswith(last) and name not in before.split(",")]
        if not found and self.values in ("models", "file", "dir"):  # the shell knows best
            return [CompletionItem(incomplete, type="dir" if self.values == "dir" else "file")]
        return [CompletionItem(f"{before}{comma}{name}") for name in found]


def _models() -> Iterator[str]:
    specs = resolve_name("planner.libraries.names:SPECS")
    return (f"{library}:{name}" for library, spec in specs.items() for name in spec.published)


def _assigned() -> Iterator[str]:
    """FIELD=VALUE of every field, where its values are few, and else FIELD=."""
    for kind in (FactoryModel, NamedModel, SwinConfig, TrainSetting):
        for name, field in kind.model_fields.items():
            yield from (f"{name}={value}" for value in _choices(field.annotation) or ("",))


def _choices(annotation: Any) -> tuple[str, ...]:
    """The values of a field that has few."""
    of_literal = map(str, get_args(annotation)) if get_origin(annotation) is Literal else ()
    return ("true", "false") if annotation is bool else tuple(of_literal)


# The lists that an option's `values` name, or where they are: imported when a shell asks.
LISTS: Mapping[str, Any] = {
    "models": _models, "assigned": _assigned, "devices": ("auto", "cpu", "cuda"),
    "gpus": "planner.machine.hardware:all_gpus", "trainers": "planner.trainers.registry:TARGETS",
    "links": "planner.machine.hardware.fabric:all_links", "allowed": "planner.advice.wish:ALLOWED",
    "kept": lambda: (*resolve_name("planner.advice.wish:EFFECTS"), *TrainSetting.model_fields),
}  # fmt: skip


def _group(parameters: Sequence[click.Parameter], read: Callable[[Mapping[str, Any]], Any]) -> Any:
    """A field of a request that holds what was typed of another class's options, as `read`."""
    return dataclasses.field(metadata={"parameters": parameters, "read": read})


def argument(text: str, values: str = "", **default: Any) -> Any:
    """A field of a request that is typed without an option, and is shown as `text`."""
    said = Option(text, values=values, is_argument=True)
    return dataclasses.field(metadata={"option": said}, **default)


def declared(kind: type[BaseModel]) -> Any:
    """A field of a request that holds what was typed of the options of a model, as its keywords."""
    own, fields = declared_options(kind), kind.model_fields
    switches = {name for name in own if fields[name].annotation is bool}
    parameters = [_option(n, said, "bool" if n in switches else "str") for n, said in own.items()]
    return _group(parameters, lambda typed: {n: typed[n] for n in own if typed[n]})


def _parameter(field: dataclasses.Field[Any]) -> click.Parameter:
    """The option or argument of a dataclass's field, from its type as it is written."""
    written = field.type if isinstance(field.type, str) else formatannotation(field.type)
    said, kind = field.metadata["option"], written.removesuffix(" | None")
    several, is_needed = kind.startswith("tuple"), field.default is dataclasses.MISSING
    if not said.is_argument:
        return _option(field.name, said, kind, field.default, several)
    return click.Argument(
        [field.name], type=Text(said.values) if said.values else click.STRING, required=is_needed,
        nargs=-1 if several else 1, metavar=said.text if several or is_needed else f"[{said.text}]",
    )  # fmt: skip


def _option(
    name: str, said: Option, kind: str = "str", default: Any = None, is_repeated: bool = False
) -> click.Option:
    of_kind: dict[str, Any] = {"int": click.INT, "float": click.FLOAT}
    value: Any = Text(said.values, "," in said.metavar)
    if kind.startswith("Literal"):
        value = click.Choice(said.values)
    elif said.bounds is not None:
        least, most = said.bounds
        value = click.IntRange(least, most if most < MAX_SIZE else None)
    else:
        value = of_kind.get(kind, value)
    is_needed = default is dataclasses.MISSING
    default = None if is_needed or default == () else default
    shown, text = said.shown or ("" if default is None else str(default)), said.text
    if shown and kind != "bool":
        text = f"{text.removesuffix('.')} (default: {shown})."
    how = {"is_flag": True} if kind == "bool" else {
        "type": value, "multiple": is_repeated,
        **({"required": True} if is_needed else {"default": default}),  # click takes None for one
        "metavar": said.metavar or (None if kind.startswith("Literal") else "N"),
    }  # fmt: skip
    flags = [said.flag_of(name), *([said.also] if said.also else []), name]
    found = _Option(flags, help=text, **how)
    found.heading = said.heading
    return found


# The schema's fields on a command line


OWN = {**declared_options(SwinConfig), **declared_options(TrainSetting)}


@dataclass(frozen=True)
class Fields:
    """What was typed of a model and of a setting, as text by field."""

    model: dict[str, str]
    setting: dict[str, str]

    def add(self, field: str, text: str, twice: str) -> None:
        """Raises UsageError for a field that is there."""
        fields = self.setting if field in TrainSetting.model_fields else self.model
        refuse_if(field in fields, twice)
        fields[field] = text

    @property
    def flags(self) -> list[str]:
        """The options that name them."""
        names = (*self.model, *self.setting)
        return [OWN[name].flag_of(name) if name in OWN else "--set" for name in names]


ANY = "Any field of the model or of the setting; may be repeated."


def of_schema(
    values: Literal["rows", "searched", "one"] = "rows", *, one: Sequence[str] = (),
    without: Sequence[str] = (),
) -> Any:  # fmt: skip
    """A request's field that holds the `Fields` that were typed: each field of the schema with an
    option, but `without` some, and any other by --set. A setting's, but for `one`, take several
    values, as `rows` or to be `searched`."""
    own = {name: said for name, said in OWN.items() if name not in without}
    singly = (*SwinConfig.model_fields, *one)
    parameters = [_of_schema(n, said, "one" if n in singly else values) for n, said in own.items()]
    of_any = Option(ANY, "FIELD=VALUE", flag="--set", values="assigned")
    parameters.append(_option("fields", of_any, is_repeated=True))
    return _group(parameters, lambda typed: read_fields(typed, own))


def _of_schema(name: str, said: Option, values: str) -> click.Option:
    kind: Any = SwinConfig if name in SwinConfig.model_fields else TrainSetting
    field = kind.model_fields[name]
    choices = said.values or _choices(field.annotation)
    text = said.text or f"{alternatives(choices)}."
    default = "the model's" if kind is SwinConfig else str(field.default).lower()
    letter = said.metavar or (name[0].upper() if choices else "N")
    if values == "searched":
        text = f"{text.removesuffix('.')}: search only these."
    said = replace(
        said, text=text, values=choices,
        metavar=letter if values == "one" else f"{letter}[,{letter}…]",
        shown="" if values == "searched" else said.shown or default,
    )  # fmt: skip
    return _option(name, said, is_repeated=values == "searched")


def read_fields(typed: Mapping[str, Any], own: Mapping[str, Option]) -> Fields:
    """What options and --set say of the model and of the setting, each field once.

    Raises UsageError: an unknown field, one that is given twice.
    """
    found = split_fields(typed["fields"])
    for name, said in own.items():
        written = typed[name]
        if written:
            text = ",".join(written) if isinstance(written, tuple) else written
            found.add(name, text, f"{name} is given twice: by {said.flag_of(name)} and by --set.")
    return found


def split_fields(fields: Iterable[str]) -> Fields:
    """`FIELD=VALUE`s as those of the model and those of the setting. Raises UsageError."""
    found = Fields({}, {})
    for entry in fields:
        field, equals, value = entry.partition("=")
        field, value = field.strip().replace("-", "_"), value.strip()
        law = f"--set takes FIELD=VALUE, and {shorten(entry)} has no '='."
        refuse_if(not equals, law, "For example --set embed_dim=64.")
        if field not in TrainSetting.model_fields and field not in MODEL_FIELDS:
            raise unknown_field(field, value, "--set ")
        found.add(field, value, f"--set {field} is given twice.")
        refuse_if(not value, f"--set {field} has no value.", EMPTY)
    return found


# Requests and commands


@dataclass_transform(
    frozen_default=True, kw_only_default=True,
    field_specifiers=(option, switch, argument, declared, of_schema),
)  # fmt: skip
class Request:
    """What a command was asked; each kind is a dataclass."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    @classmethod
    def read(cls, typed: Mapping[str, Any]) -> Self:
        """The request that click's parameters mean. Raises UsageError."""
        readers = {f.name: f.metadata.get("read") for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        return cls(**{n: read(typed) if read else typed[n] for n, read in readers.items()})


class Json(Request):
    """That an answer may be JSON."""

    as_json: bool = switch("Print JSON for a program: sizes in bytes, times in seconds.", "--json")


class Printed(Json):
    """And more than its first screen."""

    detail: bool = switch("Print all of the answer, not only its first screen.")


RequestT = TypeVar("RequestT", bound=Request)


def reads(
    request: type[RequestT], **settings: Any
) -> Callable[[Callable[[RequestT], int | None]], Command]:
    """Makes of a function of a request the command that reads one."""
    fields = dataclasses.fields(request)  # type: ignore[arg-type]
    parameters = [p for f in fields for p in f.metadata.get("parameters") or [_parameter(f)]]

    def made(run: Callable[[RequestT], int | None]) -> Command:
        callback = lambda **typed: run(request.read(typed))  # noqa: E731
        return Command(run.__name__, run, settings, params=parameters, callback=callback)

    return made
