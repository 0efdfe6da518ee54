"""Published weights, which a setting that trains only a part of a model needs to begin with."""

from __future__ import annotations

from collections.abc import Mapping

from planner.core.schema import Model, SwinConfig, TrainSetting
from planner.estimation.recipe import fine_tunes
from planner.libraries.registry import find_library

# In which fields a model may differ from the published one whose weights it loads. timm fits
# position biases to other windows and the patch embedding to other channels.
_ANY = frozenset(
    {"name", "num_classes", "image_size", "drop_rate", "attn_drop_rate", "drop_path_rate"}
)
_FREE: Mapping[str, frozenset[str]] = {
    "timm": _ANY | {"window_size", "in_channels"},
    "torchvision": _ANY,
    "transformers": _ANY,
}

RECIPE_NOTE = (
    "The recipe is the authors' from the weights of ImageNet-22k, for all of a model: 2e-5 for 512 "
    "images, 30 epochs with 5 of warm-up, a weight decay of 1e-8 (microsoft/Swin-Transformer "
    "@f0ca48c, configs/swin/swin_base_patch4_window7_224_22kto1k_finetune.yaml). Adapters and few "
    "stages often take a larger rate."
)


def weights_name(model: Model, setting: TrainSetting) -> str | None:
    """What the library of `model` calls the weights to fine-tune; None without a name or a need."""
    return published_weights(model) if fine_tunes(setting) else None


def published_weights(model: Model) -> str | None:
    """What the library of `model` calls weights that fit it; None where none do."""
    if not isinstance(model, SwinConfig) or model.name is None:
        return None
    free = _FREE.get(model.library)
    published = find_library(model.library).find(model.name)
    if free is None or published is None:
        return None
    mine, theirs = model.model_dump(), published.model_dump()
    return model.name if all(mine[f] == theirs[f] for f in mine if f not in free) else None


def build_call(model: Model, setting: TrainSetting) -> str:
    """The call of `build_model` in a script: with the weights that it fine-tunes, if there are."""
    loads = weights_name(model, setting) is not None
    return f"build_model({'pretrained=True' if loads else ''})"


def fine_tuning_notes(model: Model, setting: TrainSetting) -> tuple[str, ...]:
    """What to know of a file that trains a part of `model`; none where it trains all of it."""
    if not fine_tunes(setting):
        return ()
    if weights_name(model, setting) is not None:
        return (RECIPE_NOTE,)
    return (
        f"{model.title} has no published weights under a name that its library loads: load yours "
        "in build_model(), before what is frozen, or it stays random.",
        RECIPE_NOTE,
    )
