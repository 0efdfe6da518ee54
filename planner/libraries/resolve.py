"""From what a person calls a model to its configuration. Imports no torch."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from planner.core.errors import UsageError, alternatives, nearest, unknown_name
from planner.core.schema import FactoryModel, Model, SwinConfig, parse
from planner.libraries.microsoft.yaml_files import is_authors_file, read_authors_file
from planner.libraries.named import HUB, any_of_timm, find_named, names_with
from planner.libraries.named import LIBRARIES as NAMED_LIBRARIES
from planner.libraries.registry import SPECS, find_library

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
