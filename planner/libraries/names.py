"""From what a person calls a model to its configuration: a Swin on shapes, another model that an
installed library builds by name, a file, a factory.

Imports no torch by itself: a library is imported where it is asked what a name means.
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
    PlannerError,
    UnsupportedError,
    UsageError,
    alternatives,
    nearest,
    unknown_name,
)
from planner.core.files import MAX_MODEL_BYTES, read_text
from planner.core.schema import FactoryModel, Model, NamedModel, SwinConfig, parse
from planner.core.schema.setting import Attention
from planner.core.terminal import shows_seconds
from planner.ledger import cache as ledger_cache
from planner.ledger.cache import name_key
from planner.libraries.microsoft.spec import SPEC as MICROSOFT
from planner.libraries.microsoft.spec import is_authors_file, read_authors_file
from planner.libraries.native.spec import SPEC as NATIVE
from planner.libraries.spec import IMAGENET_1K, IMAGENET_22K, PRETRAINED_192, SIZES, LibrarySpec
from planner.libraries.timm.spec import SPEC as TIMM
from planner.libraries.timm.spec import any_of_timm

if TYPE_CHECKING:
    from torch import nn


# The libraries whose Swins are on shapes. To add one: a folder with a `spec.py`, a line here.

SPECS: Mapping[str, LibrarySpec] = {spec.name: spec for spec in (NATIVE, TIMM, MICROSOFT)}


def find_library(name: str) -> LibrarySpec:
    """The spec of the library called `name`. Raises UsageError."""
    if name not in SPECS:
        raise unknown_name("library", name, SPECS, f"Libraries: {', '.join(SPECS)}.")
    return SPECS[name]


# A model that an installed library builds by name and that is no Swin of ours.

NAMED_LIBRARIES = ("timm", "torchvision", "transformers")


def _of_hub(version: int, name: str, image: int, window: int, labels: int, *sizes: str) -> Any:
    """Swins of one configuration: their names, and what differs from their class's defaults."""
    kind = "Swin" if version == 1 else "Swinv2"
    for size in sizes:
        fields = {**SIZES[size], "image_size": image, "window_size": window, "num_labels": labels}
        if "to" in name:
            fields["pretrained_window_sizes"] = PRETRAINED_192
        called = f"microsoft/{kind.lower()}-{size}-patch4-{name}"
        yield called, {"architectures": [f"{kind}ForImageClassification"], **fields}


# The Swins on the Hugging Face hub: what `AutoModelForImageClassification.from_pretrained(name)`
# builds, so that nothing is downloaded to build one.
HUB: Mapping[str, dict[str, Any]] = dict([
    *_of_hub(1, "window7-224", 224, 7, IMAGENET_1K, "tiny", "small", "base", "large"),
    *_of_hub(1, "window12-384", 384, 12, IMAGENET_1K, "base", "large"),
    *_of_hub(1, "window7-224-in22k", 224, 7, IMAGENET_22K, "base", "large"),
    *_of_hub(1, "window12-384-in22k", 384, 12, IMAGENET_22K, "base", "large"),
    *_of_hub(2, "window8-256", 256, 8, IMAGENET_1K, "tiny", "small", "base"),
    *_of_hub(2, "window16-256", 256, 16, IMAGENET_1K, "tiny", "small", "base"),
    *_of_hub(2, "window12-192-22k", 192, 12, IMAGENET_22K, "base", "large"),
    *_of_hub(2, "window12to16-192to256-22kto1k-ft", 256, 16, IMAGENET_1K, "base", "large"),
    *_of_hub(2, "window12to24-192to384-22kto1k-ft", 384, 24, IMAGENET_1K, "base", "large"),
])  # fmt: skip


def find_named(library: str, name: str, overrides: Mapping[str, Any]) -> NamedModel:
    """The model that `library` calls `name`, with the fields of `overrides` in place of its own.

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
    """The library's real module, of random weights, in training mode. Imports torch.

    Raises PlannerError where the library is not installed, UnsupportedError where its model cannot
    compute `attention`.
    """
    module: nn.Module = _of_library(model.library, "build_named")(model, attention)
    return module.train()


def configuration_file(name: str) -> Path | None:
    """The `config.json` that `name` is or holds, if it is a file or a folder."""
    path = Path(name)
    if path.is_dir():
        return path / "config.json"
    return path if name.endswith(".json") else None


def _look_up(fields: dict[str, Any]) -> Mapping[str, Any]:
    """What the library says of a name: asked once for each version of it, since that imports it."""
    key = name_key(fields)
    kept = ledger_cache.load(key)
    if isinstance(kept, dict):
        return kept
    with shows_seconds():
        found = look_up(fields["library"], fields["name"])
    ledger_cache.store(key, found)
    return found


def look_up_here(library: str, name: str) -> dict[str, Any]:
    """The fields of a `NamedModel` that `library` knows of a name. Imports it, and torch."""
    found: dict[str, Any] = _of_library(library, "look_up")(name)
    return found


# The recorder asks its own process in place of this one (`planner.recording.recordings`).
look_up: Callable[[str, str], dict[str, Any]] = look_up_here


_FILES = {"timm": "timm.spec"}  # of the others it is named as the library


def _of_library(library: str, function: str) -> Any:
    """A function of the library's `module`, which reports where the library is not installed."""
    assert library in NAMED_LIBRARIES

    def call(*arguments: Any) -> Any:
        try:
            module = importlib.import_module(f"planner.libraries.{_FILES.get(library, library)}")
            return getattr(module, function)(*arguments)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing not in (library, "torch"):
                raise
            needs = "" if missing == library else f" needs {missing}, which"
            raise PlannerError(
                f"{library}{needs} is not installed, so what its models are called is not known.",
                f"Install it with: pip install 'planner[{library}]'",
            ) from error

    return call


def names_with(text: str) -> list[str]:
    """The models of timm and torchvision, where they are installed, and the Swins of transformers,
    whose names contain `text`; first those that begin with it."""
    found = [f"transformers:{name}" for name in HUB]
    for library in ("timm", "torchvision"):
        with suppress(PlannerError), shows_seconds():
            found += [f"{library}:{name}" for name in _of_library(library, "names")()]
    said = text.casefold()
    found = [name for name in found if said in name]
    return sorted(found, key=lambda name: not name.partition(":")[2].startswith(said))


# From what a person calls a model to its configuration.

LIBRARIES = tuple(dict.fromkeys((*SPECS, *NAMED_LIBRARIES)))
CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
LIST_MODELS = "List Swins with 'planner models'."
# How the Swins that need no library begin: a name near one of them is a typo, told without import.
_OUR_SWIN = re.compile(r"(microsoft/)?swin(v2)?[-_](?!cr_)")
_OF_VISION = re.compile(r"swin_(v2_)?[tsb]")  # torchvision's, which no other library calls so
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def resolve_model(text: str | PathLike[str], overrides: Mapping[str, Any] | None = None) -> Model:
    """The model that `text` names, with the fields of `overrides` in place of its own.

    `text` is LIBRARY:NAME, a published name of a Swin that only one library has, a YAML or JSON
    file of a SwinConfig (or one of the authors' own YAML files), or package.module:factory. A NAME
    that is no Swin of ours is looked up in the installed library (timm, torchvision, transformers):
    `timm:vit_base_patch16_224`, `torchvision:swin3d_t`, `transformers:ViTForImageClassification`
    or, of a model of transformers, a folder with its `config.json`. Another image
    size leaves the window as it is, in every library; where the window is larger than a feature
    map, each library does what it does. Raises UsageError for what cannot be read, listing every
    fault, UnsupportedError for what the library cannot build, and PlannerError where a library that
    must be asked is not installed.
    """
    overrides = overrides or {}
    text = fspath(text)
    prefix, colon, name = text.partition(":")
    if colon and prefix in LIBRARIES:
        return _find_in_library(prefix, name, overrides)
    if text.lower().endswith(CONFIG_SUFFIXES):
        return _from_file(Path(text), overrides)
    if not colon:
        if text in HUB:
            return find_named("transformers", text, overrides)
        if _OF_VISION.fullmatch(text):
            return find_named("torchvision", text, overrides)
        return override(_find_published(text), overrides)
    if _is_mistyped_library(prefix, name):
        raise unknown_name("library", prefix, LIBRARIES, f"Libraries: {', '.join(LIBRARIES)}.")
    return _factory(text, overrides)


def _find_in_library(library: str, name: str, overrides: Mapping[str, Any]) -> Model:
    """A Swin of ours, which is known without the library; else what the library says it is."""
    known: Mapping[str, Any] = HUB if library == "transformers" else {}
    if library in SPECS:
        spec = SPECS[library]
        config = spec.find(name)
        if config is not None:
            return override(config, overrides)
        known = {**spec.published, **spec.tagged}
    mistyped = _OUR_SWIN.match(name) is not None and bool(nearest(name, known))
    if library in NAMED_LIBRARIES and (name in known or not mistyped):
        return find_named(library, name, overrides)
    raise unknown_name(f"model of {library}", name, known, LIST_MODELS)


def _find_published(name: str) -> SwinConfig:
    found = [
        config for spec in SPECS.values() if (config := _find_quietly(spec.name, name)) is not None
    ]
    if not found:
        if name in LIBRARIES:
            raise UsageError(
                f"{name!r} is a library, not a model.",
                f"Write {name}:NAME; 'planner models {name}:' lists names.",
            )
        for spec in SPECS.values():
            spec.find(name)  # says why, where it is a model that a library refuses
        raise _unknown_bare_name(name)
    if len(found) > 1:
        choices = ", ".join(config.title for config in found)
        raise UsageError(
            f"{len(found)} libraries have a model {name!r}.", f"Choose one of: {choices}."
        )
    return found[0]


def _unknown_bare_name(name: str) -> UsageError:
    """A Swin that is mistyped, or another model without its library, for which no Swin is meant."""
    first = re.split(r"[^A-Za-z]|(?<=[a-z])[A-Z]", name)[0]
    if "/" not in name and nearest(first, ["swin"]):
        return unknown_name("model", name, _all_names(), f"Write LIBRARY:NAME. {LIST_MODELS}")
    if "/" in name:
        way_out = "Nothing is downloaded: a folder with its config.json is a model, as is a class."
        way_out += f" Write transformers:FOLDER or transformers:CLASS.\n{any_of_timm(name)}"
    else:
        meant = [one for one in names_with(name) if one.endswith(f":{name}")]
        way_out = f"Did you mean {alternatives(meant)}? " if meant else ""
        way_out += f"Only Swins go without their library.\n{any_of_timm(name)}"
    return unknown_name("model", name, (), way_out)


def _find_quietly(library: str, name: str) -> SwinConfig | None:
    """A bare name is refused only where nobody has it: one library's other model may be a Swin of
    another's."""
    spec = SPECS[library]
    return spec.published.get(name) or spec.tagged.get(name)


def _all_names() -> list[str]:
    return [name for spec in SPECS.values() for name in spec.published]


def override(config: SwinConfig, overrides: Mapping[str, Any]) -> SwinConfig:
    """A model with some fields changed, checked. Raises as `resolve_model`."""
    if overrides:
        config = parse(SwinConfig, {**config.model_dump(), **overrides}, config.title)
    find_library(config.library).check(config)
    return config


def _from_file(path: Path, overrides: Mapping[str, Any]) -> SwinConfig:
    data = _read(path)
    source = str(path)
    if is_authors_file(data):
        data = read_authors_file(data, source)
    return override(parse(SwinConfig, {**data, **overrides}, source), {})


def _read(path: Path) -> Mapping[str, Any]:
    """The mapping in a YAML or JSON file. Raises UsageError."""
    from planner.core.files import MAX_MODEL_BYTES, parse_json, parse_yaml, read_text

    text = read_text(path, MAX_MODEL_BYTES)
    parse_text = parse_json if path.suffix.lower() == ".json" else parse_yaml
    data = parse_text(text, str(path))
    if not isinstance(data, dict):
        raise UsageError(f"{path} holds no fields.", "Write one field a line, as 'embed_dim: 96'.")
    return {str(field): value for field, value in data.items()}


def _is_mistyped_library(prefix: str, name: str) -> bool:
    """`tim:swin_tiny_…` and not a factory: no module of that name, but a library's near it."""
    if "." in prefix or not nearest(prefix, LIBRARIES):
        return False
    known = any(name in spec.published or name in spec.tagged for spec in SPECS.values())
    return known or not (_FACTORY.fullmatch(f"{prefix}:{name}") and _is_module(prefix))


def _is_module(name: str) -> bool:
    """Whether a module of this name is installed, or lies in the working directory."""
    if Path(f"{name}.py").is_file() or Path(name).is_dir():
        return True
    return importlib.util.find_spec(name) is not None


def _factory(text: str, overrides: Mapping[str, Any]) -> FactoryModel:
    if not _FACTORY.fullmatch(text):
        raise UsageError(
            f"{text!r} names no model.",
            f"Write LIBRARY:NAME (libraries: {', '.join(LIBRARIES)}), a YAML or JSON file, or "
            "FILE:NAME of a Python file in the current folder (my_model:build).",
        )
    return parse(FactoryModel, {"factory": text, **overrides}, text)
