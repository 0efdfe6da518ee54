"""Source of a model of which a part is trained: frozen stages, adapters.

The adapters are those of `planner/libraries/adapters.py`, written out, or peft's own, whose step is
the same, event by event.
"""

from __future__ import annotations

from planner.core.schema import Model, SwinConfig, TrainSetting
from planner.estimation.recipe import fine_tunes
from planner.libraries.registry import find_library
from planner.libraries.trainable import HEADS, Trainable
from planner.trainers.copies import Source, before_return, copied
from planner.trainers.pretrained import weights_name
from planner.trainers.source import MODEL, literal, model_source
from planner.trainers.templates import macro
from planner.trainers.timm import create_model_arguments

_WIDTH = 96


def trained_source(
    model: Model, setting: TrainSetting, by_peft: bool = False, weights: str | None = None
) -> Source:
    """`build_model()` as `model_source` writes it, trained where `setting` trains it; with
    `weights`, or what a setting fine-tunes, it is `build_model(pretrained)`."""
    built = model_source(model, setting)
    if (weights := weights or weights_name(model, setting)) is not None:
        assert isinstance(model, SwinConfig)  # no other has published weights
        built = _with_weights(built, model, weights)
    if not fine_tunes(setting):
        return built
    assert isinstance(model, SwinConfig), "`setting_refusals` refuses any other"
    chosen = Trainable.of(setting, find_library(model.library).frozen_names)
    added = _peft(chosen) if by_peft and chosen.lora_rank else _own(chosen)
    head, _, lines = added.body.rpartition("\n\n\n")
    body = before_return(built.body, lines)
    return Source((*built.imports, *added.imports), f"{head}\n\n\n{body}")


def _replaced(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, old
    return text.replace(old, new)


def _with_weights(built: Source, model: SwinConfig, weights: str) -> Source:
    """`build_model(pretrained)`, which loads what the library publishes as `weights`."""
    body = _replaced(built.body, "build_model()", "build_model(pretrained: bool = False)")
    if model.library == "timm":
        created = "timm.create_model(\n        "
        name = literal(create_model_arguments(model)[0])
        asked = f"{literal(weights)},\n        pretrained=pretrained"
        return Source(built.imports, _replaced(body, created + name, created + asked))
    imports = built.imports
    if model.library == "torchvision":
        imports = (*imports, "from torchvision.models import get_model_weights")
    own = find_library(model.library).published[weights]
    lines = macro(
        f"load_{model.library}",
        MODEL,
        weights=literal(weights),
        other_classes=model.num_classes != own.num_classes,
    )
    return Source(imports, before_return(body, lines))


def _own(chosen: Trainable) -> Source:
    """The helpers, and below them the lines of `build_model` that use them."""
    patterns, lines = _pattern("FROZEN", chosen.frozen), "    freeze(model, FROZEN)\n"
    helpers = copied("planner.libraries.adapters", "freeze")
    if chosen.lora_rank:
        helpers = copied("planner.libraries.adapters", "LoraLinear", "freeze", "add_adapters")
        patterns += _pattern("ADAPTED", chosen.adapted)
        lines += f"    add_adapters(model, ADAPTED, {chosen.lora_rank})\n"
    return Source(helpers.imports, f"{patterns}\n\n{helpers.body}{lines}")


def _peft(chosen: Trainable) -> Source:
    """peft freezes the rest by itself. It would copy an adapter's input to fp32, and back."""
    lines = macro("add_peft", MODEL, rank=chosen.lora_rank, head=HEADS[-1])
    imports = ("from peft import LoraConfig, get_peft_model",)
    return Source(imports, f"{_pattern('ADAPTED', chosen.adapted)}\n\n{lines}")


def _pattern(name: str, pattern: str) -> str:
    """`name = r"…"`, over as many lines as it takes, which begin behind a "|"."""
    whole = f'{name} = r"{pattern}"\n'
    if len(whole) <= _WIDTH:
        return whole
    lines = [""]
    for part in pattern.split("|"):
        if len(lines[-1]) + len(part) > _WIDTH - 10:
            lines.append("")
        lines[-1] += f"{part}|"
    lines[-1] = lines[-1].removesuffix("|")
    return f"{name} = (\n" + "".join(f'    r"{line}"\n' for line in lines) + ")\n"
