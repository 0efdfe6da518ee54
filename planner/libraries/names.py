"""From the name that a person gives a model to its configuration: a Swin on shapes, another model
that an installed library builds by name, a file, a factory.

First the libraries and their models, then `resolve_model`. Imports no torch by itself: a library is
imported to look up a name.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.core.errors import (
    Fault,
    PlannerError,
    UnsupportedError,
    UsageError,
    alternatives,
    nearest,
    unknown_name,
)
from planner.core.files import MAX_MODEL_BYTES, parse_json, parse_yaml, read_text
from planner.core.schema import FactoryModel, Model, NamedModel, SwinConfig, TrainSetting, parse
from planner.core.schema.model import NAMED_LIBRARIES, is_factory
from planner.core.schema.setting import Attention
from planner.core.terminal import shows_seconds
from planner.ledger import cache as ledger_cache
from planner.ledger.cache import name_key
from planner.libraries.limits import module_faults
from planner.libraries.microsoft.spec import SPEC as MICROSOFT
from planner.libraries.microsoft.spec import is_authors_file, read_authors_file
from planner.libraries.native.spec import SPEC as NATIVE
from planner.libraries.spec import LibrarySpec, not_installed, published_fields
from planner.libraries.timm.spec import SPEC as TIMM
from planner.libraries.timm.spec import timm_hint

if TYPE_CHECKING:
    from torch import nn


# The libraries whose Swins are on shapes. To add one: a folder with a `spec.py`, a line here.

SPECS: Mapping[str, LibrarySpec] = {spec.name: spec for spec in (NATIVE, TIMM, MICROSOFT)}


def find_library(name: str) -> LibrarySpec:
    """The spec of the library called `name`. Raises UsageError."""
    if name not in SPECS:
        raise unknown_name("library", name, SPECS, f"Libraries: {', '.join(SPECS)}.")
    return SPECS[name]


def faults_of(model: Model, setting: TrainSetting) -> list[Fault]:
    """Why `setting` cannot run with `model`, as far as is known before the model is built."""
    if isinstance(model, SwinConfig):
        return find_library(model.library).setting_faults(model, setting)
    return list(module_faults(model, setting))


# Models that an installed library builds by name and that are no Swins of ours.


# The Swins on the Hugging Face hub, as `AutoModelForImageClassification.from_pretrained(name)`
# builds them: the fields that differ from the defaults of their class. So nothing is downloaded to
# build one.
HUB = published_fields("transformers")


def find_named(library: str, name: str, overrides: Mapping[str, Any]) -> NamedModel:
    """The model that `library` calls `name`, with the fields of `overrides` changed.

    Raises UsageError for an unknown name or a bad field, UnsupportedError for a model whose
    training step is not known, PlannerError where the library is not installed.
    """
    fields: dict[str, Any] = {"library": library, "name": name}
    if library == "transformers" and (file := configuration_file(name)) is not None:
        content = read_text(file, MAX_MODEL_BYTES)
        fields["config_sha256"] = hashlib.sha256(content.encode()).hexdigest()
    fields |= _look_up(fields)
    return override_named(parse(NamedModel, fields, f"{library}:{name}"), overrides)


def override_named(model: NamedModel, overrides: Mapping[str, Any]) -> NamedModel:
    """`model` with some fields changed, checked. Raises UsageError and UnsupportedError."""
    for field in overrides:
        if field in NamedModel.model_fields and getattr(model, field) is None:
            raise UnsupportedError(
                f"{model.title} has no {field}.", f"Omit {field}: it would change nothing."
            )
    if not overrides:
        return model
    return parse(NamedModel, {**model.model_dump(), **overrides}, model.title)


def build_named(model: NamedModel, attention: Attention = "library") -> nn.Module:
    """The library's real module, with random weights, in training mode. Imports torch.

    Raises PlannerError if the library is not installed, UnsupportedError if its model has no
    `attention`.
    """
    module: nn.Module = _library_function(model.library, "build_named")(model, attention)
    return module.train()


def configuration_file(name: str) -> Path | None:
    """The `config.json` at `name` or in the folder `name`; None if it is no path."""
    path = Path(name)
    if path.is_dir():
        return path / "config.json"
    return path if name.endswith(".json") else None


def _look_up(fields: dict[str, Any]) -> Mapping[str, Any]:
    """The library's answer about a name. It is cached for each version of the library, since a
    look-up imports it."""
    key = name_key(fields)
    cached = ledger_cache.load(key)
    if isinstance(cached, dict):
        return cached
    with shows_seconds():
        answer = look_up(fields["library"], fields["name"])
    ledger_cache.store(key, answer)
    return answer


def look_up_in_process(library: str, name: str) -> dict[str, Any]:
    """The fields of a `NamedModel` that `library` has for a name. Imports it, and torch."""
    fields: dict[str, Any] = _library_function(library, "look_up")(name)
    return fields


# The recorder replaces this by a look-up in its own process (`planner.recording.recordings`).
look_up: Callable[[str, str], dict[str, Any]] = look_up_in_process


_FILES = {"timm": "timm.spec"}  # the file of another library has the library's name


def _library_function(library: str, function: str) -> Any:
    """A function of the library's file. Calling it raises PlannerError if the library is not
    installed."""
    assert library in NAMED_LIBRARIES

    def call(*arguments: Any) -> Any:
        try:
            module = importlib.import_module(f"planner.libraries.{_FILES.get(library, library)}")
            return getattr(module, function)(*arguments)
        except ModuleNotFoundError as error:
            raise not_installed(library, error) from error

    return call


def search_names(text: str) -> list[str]:
    """The names that contain `text` among the models of timm and torchvision, if they are
    installed, and the Swins of transformers; first those that begin with it."""
    names = [f"transformers:{name}" for name in HUB]
    for library in ("timm", "torchvision"):
        with suppress(PlannerError), shows_seconds():
            names += [f"{library}:{name}" for name in _library_function(library, "names")()]
    text = text.casefold()
    matches = [name for name in names if text in name]
    return sorted(matches, key=lambda name: not name.partition(":")[2].startswith(text))


# From the name of a model to its configuration.

ALL_LIBRARIES = tuple(dict.fromkeys((*SPECS, *NAMED_LIBRARIES)))
CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
LIST_MODELS = "List Swins with 'planner models'."
# How the names of Swins that need no library begin: a name near one of them is a typo, which is
# reported without an import.
_OUR_SWIN = re.compile(r"(microsoft/)?swin(v2)?[-_](?!cr_)")
_TORCHVISION_SWIN = re.compile(r"swin_(v2_)?[tsb]")  # which no other library calls so


def resolve_model(text: str | PathLike[str], overrides: Mapping[str, Any] | None = None) -> Model:
    """The model that `text` names, with the fields of `overrides` changed.

    `text` is LIBRARY:NAME, a published name of a Swin that only one library has, a YAML or JSON
    file of a SwinConfig (or one of the authors' YAML files), or package.module:factory. A NAME
    that is no Swin of ours is looked up in the installed library (timm, torchvision, transformers):
    `timm:vit_base_patch16_224`, `torchvision:swin3d_t`, `transformers:ViTForImageClassification`
    or, for a model of transformers, a folder with its `config.json`. Another image size leaves the
    window as it is, in every library; where the window is larger than a feature map, each library
    does what it does. Raises UsageError with all faults for a text that cannot be read,
    UnsupportedError for a model that the library cannot build, and PlannerError if a library that
    is needed for the look-up is not installed.
    """
    overrides = overrides or {}
    text = fspath(text)
    prefix, colon, name = text.partition(":")
    if colon and prefix in ALL_LIBRARIES:
        return _find_in_library(prefix, name, overrides)
    if text.lower().endswith(CONFIG_SUFFIXES):
        return _read_model(Path(text), overrides)
    if not colon:
        if text in HUB:
            return find_named("transformers", text, overrides)
        if _TORCHVISION_SWIN.fullmatch(text):
            return find_named("torchvision", text, overrides)
        return override_swin(_find_published(text), overrides)
    if _is_mistyped_library(prefix, name):
        raise unknown_name(
            "library", prefix, ALL_LIBRARIES, f"Libraries: {', '.join(ALL_LIBRARIES)}."
        )
    return _parse_factory(text, overrides)


def _find_in_library(library: str, name: str, overrides: Mapping[str, Any]) -> Model:
    """A Swin of ours, without the library; or else a model that the library knows."""
    swins: Mapping[str, Any] = HUB if library == "transformers" else {}
    if library in SPECS:
        spec = SPECS[library]
        config = spec.find(name)
        if config is not None:
            return override_swin(config, overrides)
        swins = {**spec.published, **spec.tagged}
    is_mistyped = _OUR_SWIN.match(name) is not None and bool(nearest(name, swins))
    if library in NAMED_LIBRARIES and (name in swins or not is_mistyped):
        return find_named(library, name, overrides)
    raise unknown_name(f"model of {library}", name, swins, LIST_MODELS)


def _find_published(name: str) -> SwinConfig:
    # Without `spec.find`: a name that one library refuses may be a Swin of another.
    matches = [spec.published.get(name) or spec.tagged.get(name) for spec in SPECS.values()]
    configs = [config for config in matches if config is not None]
    if not configs:
        if name in ALL_LIBRARIES:
            raise UsageError(
                f"{name!r} is a library, not a model.",
                f"Write {name}:NAME; 'planner models {name}:' lists names.",
            )
        for spec in SPECS.values():
            spec.find(name)  # raises, with the reason, if a library refuses it
        raise _unknown_bare_name(name)
    if len(configs) > 1:
        choices = ", ".join(config.title for config in configs)
        raise UsageError(
            f"{len(configs)} libraries have a model {name!r}.", f"Choose one of: {choices}."
        )
    return configs[0]


def _unknown_bare_name(name: str) -> UsageError:
    """The error for a name without a library: a mistyped Swin, or a model that is no Swin."""
    first_word = re.split(r"[^A-Za-z]|(?<=[a-z])[A-Z]", name)[0]
    if "/" not in name and nearest(first_word, ["swin"]):
        published = [name for spec in SPECS.values() for name in spec.published]
        return unknown_name("model", name, published, f"Write LIBRARY:NAME. {LIST_MODELS}")
    if "/" in name:
        way_out = "Nothing is downloaded: a folder with its config.json is a model, as is a class."
        way_out += f" Write transformers:FOLDER or transformers:CLASS.\n{timm_hint(name)}"
    else:
        matches = [match for match in search_names(name) if match.endswith(f":{name}")]
        way_out = f"Did you mean {alternatives(matches)}? " if matches else ""
        way_out += f"Only Swins go without their library.\n{timm_hint(name)}"
    return unknown_name("model", name, (), way_out)


def override_swin(config: SwinConfig, overrides: Mapping[str, Any]) -> SwinConfig:
    """A Swin with some fields changed, checked. Raises as `resolve_model`."""
    if overrides:
        config = parse(SwinConfig, {**config.model_dump(), **overrides}, config.title)
    find_library(config.library).check(config)
    return config


def _read_model(path: Path, overrides: Mapping[str, Any]) -> SwinConfig:
    data = _read_fields(path)
    source = str(path)
    if is_authors_file(data):
        data = read_authors_file(data, source)
    return override_swin(parse(SwinConfig, {**data, **overrides}, source), {})


def _read_fields(path: Path) -> Mapping[str, Any]:
    """The mapping in a YAML or JSON file. Raises UsageError."""
    text = read_text(path, MAX_MODEL_BYTES)
    parse_text = parse_json if path.suffix.lower() == ".json" else parse_yaml
    data = parse_text(text, str(path))
    if not isinstance(data, dict):
        raise UsageError(f"{path} holds no fields.", "Write one field a line, as 'embed_dim: 96'.")
    return {str(field): value for field, value in data.items()}


def _is_mistyped_library(prefix: str, name: str) -> bool:
    """Whether the text is `tim:swin_tiny_…` and no factory: there is no such module, but a library
    with nearly that name."""
    if "." in prefix or not nearest(prefix, ALL_LIBRARIES):
        return False
    is_swin = any(name in spec.published or name in spec.tagged for spec in SPECS.values())
    return is_swin or not (is_factory(f"{prefix}:{name}") and _is_module(prefix))


def _is_module(name: str) -> bool:
    """Whether a module of this name is installed, or is in the working directory."""
    if Path(f"{name}.py").is_file() or Path(name).is_dir():
        return True
    return importlib.util.find_spec(name) is not None


def _parse_factory(text: str, overrides: Mapping[str, Any]) -> FactoryModel:
    if not is_factory(text):
        raise UsageError(
            f"{text!r} names no model.",
            f"Write LIBRARY:NAME (libraries: {', '.join(ALL_LIBRARIES)}), a YAML or JSON file, or "
            "FILE:NAME of a Python file in the current folder (my_model:build).",
        )
    return parse(FactoryModel, {"factory": text, **overrides}, text)
