"""From the fields of a request class to a command: its options, --help and completion, and the
request that its function takes.

The fields of a request are `option`s, `switch`es and `argument`s. A field may also hold the typed
options of another class: those of the schema (`of_schema`) or of a search (`model_options`).
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
WORLD = ("world_size", "nodes", "parallelism")  # the fields that one GPU does not have
TO_FILE = ("FILE", "Output", "", "", "", "file")
EMPTY = "Give it a value (is a shell variable unset?), or omit it."
ONCE = "Type it once. Where --help shows [,…], several values are joined by commas."
EXAMPLES = "\n\nExamples:\n"


class Command(click.Command):
    """A click command whose --help lists many options under headings, and ends with examples."""

    def __init__(self, name: str, run: Callable[..., Any], settings: Any, **kwargs: Any) -> None:
        text, _, examples = (inspect.getdoc(run) or "").partition(EXAMPLES)
        # Also for a command that is called by itself: click keeps the first help option it made.
        settings = {**HELP_SETTINGS, **settings}
        super().__init__(name, help=text, context_settings=settings, **kwargs)
        self.examples = [line.strip() for line in examples.splitlines()]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read what was typed. Raises UsageError for an option that takes one value and is typed
        twice: click would take the last."""
        typed = self.make_parser(ctx).parse_args(list(args))[2]
        twice = {p.opts[0] for p in typed if typed.count(p) > 1 and not p.multiple}
        refuse_if(twice, f"{' and '.join(twice)} is typed twice.", ONCE)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. An error that names a field names its option, if that was typed."""
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
                formatter.write(f"  {example}\n")  # never wrapped, so that it can be copied

    def sections(self, ctx: click.Context) -> list[tuple[str, list[tuple[str, str]]]]:
        """The options as --help shows them: (its form, what it does) of each, by heading."""
        sections: dict[str, Any] = {heading: [] for heading in HEADINGS}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option):
                sections[getattr(param, "heading", "Output")].append(param.get_help_record(ctx))
        return [(heading, records) for heading, records in sections.items() if records]


class _Option(click.Option):
    heading = "Output"


class Text(click.ParamType[str]):
    """A text that is not blank. A shell completes it with `values`; `several` values may be joined
    by commas."""

    name = "text"

    def __init__(self, values: Sequence[str] | str, several: bool = False) -> None:
        self.values, self.several = values, several

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The text. Raises UsageError for a blank one, which is not the same as none, and for a
        program where a model is due."""
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
        prefix, comma, text = incomplete.rpartition(",") if self.several else ("", "", incomplete)
        names = self.values
        if isinstance(names, str):
            listing = VALUE_LISTS.get(names, ())
            listing = resolve_name(listing) if isinstance(listing, str) else listing
            names = [getattr(n, "name", n) for n in (listing() if callable(listing) else listing)]
        items = [name for name in names if name.startswith(text) and name not in prefix.split(",")]
        if not items and self.values in ("models", "file", "dir"):  # the shell completes paths
            return [CompletionItem(incomplete, type="dir" if self.values == "dir" else "file")]
        return [CompletionItem(f"{prefix}{comma}{name}") for name in items]


def _models() -> Iterator[str]:
    specs = resolve_name("planner.libraries.names:SPECS")
    return (f"{library}:{name}" for library, spec in specs.items() for name in spec.published)


def _assigned() -> Iterator[str]:
    """FIELD=VALUE for every field with few values, FIELD= for the others."""
    for kind in (FactoryModel, NamedModel, SwinConfig, TrainSetting):
        for name, field in kind.model_fields.items():
            yield from (f"{name}={value}" for value in _choices(field.annotation) or ("",))


def _choices(annotation: Any) -> tuple[str, ...]:
    """The values of a field, if it has few."""
    values = map(str, get_args(annotation)) if get_origin(annotation) is Literal else ()
    return ("true", "false") if annotation is bool else tuple(values)


# The lists that an option's `values` name, or their locations, imported when a shell completes.
VALUE_LISTS: Mapping[str, Any] = {
    "models": _models, "assigned": _assigned, "devices": ("auto", "cpu", "cuda"),
    "gpus": "planner.machine.hardware:all_gpus", "trainers": "planner.trainers.registry:TARGETS",
    "links": "planner.machine.hardware.fabric:all_links", "allowed": "planner.advice.wish:ALLOWED",
    "kept": lambda: (*resolve_name("planner.advice.wish:KEPT_EFFECTS"), *TrainSetting.model_fields),
}  # fmt: skip


def _group(parameters: Sequence[click.Parameter], read: Callable[[Mapping[str, Any]], Any]) -> Any:
    """A field of a request that holds several typed parameters, as `read` makes them."""
    return dataclasses.field(metadata={"parameters": parameters, "read": read})


def argument(text: str, values: str = "", **default: Any) -> Any:
    """A field of a request that is typed without an option. --help shows it as `text`."""
    spec = Option(text, values=values, is_argument=True)
    return dataclasses.field(metadata={"option": spec}, **default)


def model_options(kind: type[BaseModel]) -> Any:
    """A field of a request that holds the typed options of the model `kind`, as its keywords."""
    options, fields = declared_options(kind), kind.model_fields
    switches = {name for name in options if fields[name].annotation is bool}
    parameters = [_option(n, s, "bool" if n in switches else "str") for n, s in options.items()]
    return _group(parameters, lambda typed: {n: typed[n] for n in options if typed[n]})


def _parameter(field: dataclasses.Field[Any]) -> click.Parameter:
    """The option or argument of a dataclass's field, from the source of its type."""
    type_text = field.type if isinstance(field.type, str) else formatannotation(field.type)
    spec, kind = field.metadata["option"], type_text.removesuffix(" | None")
    is_repeated, is_required = kind.startswith("tuple"), field.default is dataclasses.MISSING
    if not spec.is_argument:
        return _option(field.name, spec, kind, field.default, is_repeated)
    return click.Argument(
        [field.name], type=Text(spec.values) if spec.values else click.STRING, required=is_required,
        nargs=-1 if is_repeated else 1,
        metavar=spec.text if is_repeated or is_required else f"[{spec.text}]",
    )  # fmt: skip


def _option(
    name: str, spec: Option, kind: str = "str", default: Any = None, is_repeated: bool = False
) -> click.Option:
    click_types: dict[str, Any] = {"int": click.INT, "float": click.FLOAT}
    value_type: Any = Text(spec.values, "," in spec.metavar)
    if kind.startswith("Literal"):
        value_type = click.Choice(spec.values)
    elif spec.bounds is not None:
        low, high = spec.bounds
        value_type = click.IntRange(low, high if high < MAX_SIZE else None)
    else:
        value_type = click_types.get(kind, value_type)
    is_required = default is dataclasses.MISSING
    default = None if is_required or default == () else default
    default_text, text = spec.shown or ("" if default is None else str(default)), spec.text
    if default_text and kind != "bool":
        text = f"{text.removesuffix('.')} (default: {default_text})."
    keywords = {"is_flag": True} if kind == "bool" else {
        "type": value_type, "multiple": is_repeated,
        **({"required": True} if is_required else {"default": default}),  # click takes None as one
        "metavar": spec.metavar or (None if kind.startswith("Literal") else "N"),
    }  # fmt: skip
    flags = [spec.flag_of(name), *([spec.also] if spec.also else []), name]
    option = _Option(flags, help=text, **keywords)
    option.heading = spec.heading
    return option


# The schema's fields on a command line


OPTIONS = {**declared_options(SwinConfig), **declared_options(TrainSetting)}


@dataclass(frozen=True)
class Fields:
    """The typed fields of a model and of a setting, as text."""

    model: dict[str, str]
    setting: dict[str, str]

    def add(self, field: str, text: str) -> None:
        """Add a field. Raises UsageError if it is already there."""
        fields = self.setting if field in TrainSetting.model_fields else self.model
        refuse_if(field in fields, f"{field} is given twice.", "Keep one of the two.")
        fields[field] = text

    @property
    def flags(self) -> list[str]:
        """The options with which the fields were typed."""
        names = (*self.model, *self.setting)
        return [OPTIONS[name].flag_of(name) if name in OPTIONS else "--set" for name in names]


ANY_FIELD_HELP = "Any field of the model or of the setting; may be repeated."


def of_schema(
    values: Literal["rows", "searched", "one"] = "rows", *, single: Sequence[str] = (),
    without: Sequence[str] = (),
) -> Any:  # fmt: skip
    """A field of a request that holds the typed `Fields`: an option for each field of the schema
    that has one, except those in `without`, and --set for any other. The fields of a setting take
    several values, as `rows` or to be `searched`, except those in `single`."""
    options = {name: spec for name, spec in OPTIONS.items() if name not in without}
    all_single = (*SwinConfig.model_fields, *single)
    parameters = [
        _schema_option(n, s, "one" if n in all_single else values) for n, s in options.items()
    ]
    any_field = Option(ANY_FIELD_HELP, "FIELD=VALUE", flag="--set", values="assigned")
    parameters.append(_option("fields", any_field, is_repeated=True))
    return _group(parameters, lambda typed: read_fields(typed, options))


def _schema_option(name: str, spec: Option, values: str) -> click.Option:
    kind: Any = SwinConfig if name in SwinConfig.model_fields else TrainSetting
    field = kind.model_fields[name]
    choices = spec.values or _choices(field.annotation)
    text = spec.text or f"{alternatives(choices)}."
    default = "the model's" if kind is SwinConfig else str(field.default).lower()
    letter = spec.metavar or (name[0].upper() if choices else "N")
    if values == "searched":
        text = f"{text.removesuffix('.')}: search only these."
    spec = replace(
        spec, text=text, values=choices,
        metavar=letter if values == "one" else f"{letter}[,{letter}…]",
        shown="" if values == "searched" else spec.shown or default,
    )  # fmt: skip
    return _option(name, spec, is_repeated=values == "searched")


def read_fields(typed: Mapping[str, Any], options: Mapping[str, Option]) -> Fields:
    """The fields of the model and of the setting that options and --set give.

    Raises UsageError for an unknown field, and for one that is given twice.
    """
    fields = split_fields(typed["fields"])
    for name in options:
        if value := typed[name]:
            fields.add(name, ",".join(value) if isinstance(value, tuple) else value)
    return fields


def split_fields(entries: Iterable[str]) -> Fields:
    """`FIELD=VALUE` entries as fields of the model and of the setting. Raises UsageError."""
    split = Fields({}, {})
    for entry in entries:
        field, equals, value = entry.partition("=")
        field, value = field.strip().replace("-", "_"), value.strip()
        law = f"--set takes FIELD=VALUE, and {shorten(entry)} has no '='."
        refuse_if(not equals, law, "For example --set embed_dim=64.")
        if field not in TrainSetting.model_fields and field not in MODEL_FIELDS:
            raise unknown_field(field, value, "--set ")
        split.add(field, value)
        refuse_if(not value, f"--set {field} has no value.", EMPTY)
    return split


# Requests and commands


@dataclass_transform(
    frozen_default=True, kw_only_default=True,
    field_specifiers=(option, switch, argument, model_options, of_schema),
)  # fmt: skip
class Request:
    """What was typed for a command. Each subclass is a dataclass."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    @classmethod
    def read(cls, typed: Mapping[str, Any]) -> Self:
        """The request that click's parameters mean. Raises UsageError."""
        readers = {f.name: f.metadata.get("read") for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        return cls(**{n: read(typed) if read else typed[n] for n, read in readers.items()})


class Json(Request):
    """A request whose answer may be JSON."""

    as_json: bool = switch("Print JSON for a program: sizes in bytes, times in seconds.", "--json")


class Printed(Json):
    """A request whose answer may be longer than a first screen."""

    detail: bool = switch("Print all of the answer, not only its first screen.")


RequestT = TypeVar("RequestT", bound=Request)


def reads(
    request: type[RequestT], **settings: Any
) -> Callable[[Callable[[RequestT], int | None]], Command]:
    """Turn a function of a request into the click command that reads such a request."""
    fields = dataclasses.fields(request)  # type: ignore[arg-type]
    parameters = [p for f in fields for p in f.metadata.get("parameters") or [_parameter(f)]]

    def decorate(run: Callable[[RequestT], int | None]) -> Command:
        callback = lambda **typed: run(request.read(typed))  # noqa: E731
        return Command(run.__name__, run, settings, params=parameters, callback=callback)

    return decorate
