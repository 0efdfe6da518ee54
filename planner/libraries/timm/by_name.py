"""Any model of timm, by its name. Needs torch and timm."""

from __future__ import annotations

from typing import Any

from torch import nn

from planner.core.errors import UnsupportedError, unknown_name
from planner.core.schema import NamedModel
from planner.core.schema.setting import Attention
from planner.libraries.missing_operators import declare_missing_operators
from planner.libraries.named import any_of_timm
from planner.libraries.timm.module import set_attention

# What is trained where the published weights end in features, without a classifier.
NUM_CLASSES = 1000


def names() -> list[str]:
    declare_missing_operators()
    import timm

    return list(timm.list_models())


def look_up(name: str) -> dict[str, Any]:
    """The fields of a `NamedModel` that timm knows of `name`: those of its published weights.

    Raises UsageError for a name that timm does not have.
    """
    declare_missing_operators()
    import timm

    architecture = name.partition(".")[0]
    if not timm.is_model(architecture):
        raise unknown_name("model of timm", name, names(), any_of_timm(name))
    try:
        weights = timm.models.get_pretrained_cfg(name)
    except RuntimeError:  # timm's own answer to a tag that it does not know
        tags = [known for known in timm.list_pretrained(f"{architecture}.*") if "." in known]
        raise unknown_name(
            f"weights of timm's {architecture}", name, tags, f"Omit the tag: timm:{architecture}."
        ) from None
    if weights is None:
        way_out = "Name a factory of yours, package.module:factory, that calls timm.create_model."
        raise UnsupportedError(f"timm does not say what images {name} takes.", way_out)
    channels, *size = weights.input_size
    return {
        "task": "classification",
        "image_size": tuple(size),
        "in_channels": channels,
        "num_classes": weights.num_classes or NUM_CLASSES,
    }


def build(model: NamedModel, attention: Attention) -> nn.Module:
    """`timm.create_model` without weights; a model of one image size is told which.

    Raises UnsupportedError for an `attention` that is not the library's own, where the model has
    none that timm can switch.
    """
    declare_missing_operators()
    import timm

    arguments: dict[str, Any] = {"in_chans": model.in_channels, "num_classes": model.num_classes}
    weights = timm.models.get_pretrained_cfg(model.name)
    if weights is not None and weights.fixed_input_size:
        arguments["img_size"] = model.image_size
    module: nn.Module = timm.create_model(model.name, **arguments)
    if attention != "library" and not set_attention(module, fused=attention == "sdpa"):
        law = f"--attention does not apply to {model.title}: it has none that timm can switch."
        raise UnsupportedError(law, "Omit --attention.")
    return module
