"""A model that an installed library builds by name and that is no Swin of ours.

Imports no torch by itself: the library is imported where it is asked what a name means.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.core.errors import PlannerError, UnsupportedError
from planner.core.files import MAX_MODEL_BYTES, read_text
from planner.core.schema import NamedModel, parse
from planner.core.schema.setting import Attention
from planner.core.terminal import shows_seconds
from planner.ledger import cache as ledger_cache
from planner.ledger.cache import name_key
from planner.libraries.spec import IMAGENET_1K, IMAGENET_22K, PRETRAINED_192, SIZES

if TYPE_CHECKING:
    from torch import nn

LIBRARIES = ("timm", "torchvision", "transformers")


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


def _of_library(library: str, function: str) -> Any:
    """A function of the library's `module`, which reports where the library is not installed."""
    assert library in LIBRARIES

    def call(*arguments: Any) -> Any:
        try:
            module = importlib.import_module(f"planner.libraries.{library}.module")
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


def any_of_timm(name: str) -> str:
    """What to do with a name that is not a Swin's: those of the kind that it begins with."""
    kind = re.match("[a-z]*", re.split("[:/]", name.lower())[-1])
    listed = f"'planner models {kind[0]}'" if kind and kind[0] else "'planner models TEXT'"
    return f"Any model of timm works, as timm:NAME; {listed} lists names."
