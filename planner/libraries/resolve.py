"""From what a person calls a model to its configuration. Imports no torch."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from planner.errors import UsageError, nearest, unknown_name
from planner.libraries.microsoft.yaml_files import is_authors_file, read_authors_file
from planner.libraries.registry import SPECS, find_library
from planner.schema import FactoryModel, SwinConfig, parse

CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
LIST_MODELS = "List models with 'planner models'."
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def resolve_model(
    text: str | PathLike[str], overrides: Mapping[str, Any] | None = None
) -> SwinConfig | FactoryModel:
    """The model that `text` names, with the fields of `overrides` in place of its own.

    `text` is LIBRARY:NAME, a published name that only one library has, a YAML or JSON file of a
    SwinConfig (or one of the authors' own YAML files), or package.module:factory. Another image
    size leaves the window as it is, in every library; where the window is larger than a feature
    map, each library does what it does. Raises UsageError for what cannot be read, listing every
    fault, and UnsupportedError for what the library cannot build.
    """
    overrides = overrides or {}
    text = fspath(text)
    if text.lower().endswith(CONFIG_SUFFIXES):
        return _from_file(Path(text), overrides)
    prefix, colon, name = text.partition(":")
    if not colon:
        return override(_find_published(text), overrides)
    if prefix in SPECS:
        return override(_find_in_library(prefix, name), overrides)
    if _is_mistyped_library(prefix, name):
        raise unknown_name("library", prefix, SPECS, f"Libraries: {', '.join(SPECS)}.")
    return _factory(text, overrides)


def _find_in_library(library: str, name: str) -> SwinConfig:
    spec = find_library(library)
    config = spec.find(name)
    if config is None:
        known = {**spec.published, **spec.tagged}
        raise unknown_name(f"model of {library}", name, known, LIST_MODELS)
    return config


def _find_published(name: str) -> SwinConfig:
    found = [
        config for spec in SPECS.values() if (config := _find_quietly(spec.name, name)) is not None
    ]
    if not found:
        if name in SPECS:
            example = next(iter(SPECS[name].published))
            raise UsageError(
                f"{name!r} is a library and not a model.",
                f"Write {name}:NAME, as {name}:{example}.",
            )
        for spec in SPECS.values():
            spec.find(name)  # says why, where it is a model that a library refuses
        raise unknown_name("model", name, _all_names(), f"Write LIBRARY:NAME. {LIST_MODELS}")
    if len(found) > 1:
        choices = ", ".join(config.title for config in found)
        raise UsageError(
            f"{len(found)} libraries have a model {name!r}.", f"Choose one of: {choices}."
        )
    return found[0]


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
    from planner.files import MAX_MODEL_BYTES, parse_json, parse_yaml, read_text

    text = read_text(path, MAX_MODEL_BYTES)
    parse_text = parse_json if path.suffix.lower() == ".json" else parse_yaml
    data = parse_text(text, str(path))
    if not isinstance(data, dict):
        raise UsageError(f"{path} holds no fields.", "Write one field a line, as 'embed_dim: 96'.")
    return {str(field): value for field, value in data.items()}


def _is_mistyped_library(prefix: str, name: str) -> bool:
    """`tim:swin_tiny_…` and not a factory: no module of that name, but a library's near it."""
    if "." in prefix or not nearest(prefix, SPECS):
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
            f"Write LIBRARY:NAME (libraries: {', '.join(SPECS)}), a YAML or JSON file, or "
            "package.module:factory.",
        )
    return parse(FactoryModel, {"factory": text, **overrides}, text)
