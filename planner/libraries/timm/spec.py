"""The spec of timm's Swin: its names, its abilities, and how to build its real module; and any
model of timm by its name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from planner.core.errors import UnsupportedError, unknown_name
from planner.core.schema import NamedModel, SwinConfig
from planner.libraries.spec import (
    Attention,
    LibrarySpec,
    check_pretrained_window,
    check_values,
    published,
)
from planner.libraries.torchvision import declare_missing_operators

if TYPE_CHECKING:
    from torch import nn


# timm's Swins (`published.json`): the names of `timm.list_models`, and those with the tag of their
# weights.
#
# timm builds a name with the class count of its first weights, and with drop path 0.1 at every
# size. `swin_s3_*` are architectures from a search (arXiv 2111.14725): Swin-T's channels, a window
# for each stage. `swinv2_cr_*` is another architecture (with other attention and norms) and is
# recorded.


def _attentions(config: SwinConfig) -> tuple[Attention, ...]:
    """Version 1 has a fused attention that timm leaves off; version 2 has none."""
    return ("eager", "sdpa") if config.version == 1 else ("eager",)


def _faults(config: SwinConfig) -> list[str]:
    return [
        *check_values(config, patch_norm=True, absolute_position_embedding=False),
        *check_pretrained_window(config),
    ]


SPEC = LibrarySpec(
    name="timm",
    title="timm",
    published=published("timm"),
    tagged=published("timm", "timm with tags"),
    attentions=_attentions,
    faults=_faults,
    block_classes=("SwinTransformerBlock", "SwinTransformerV2Block"),
)


# The real module, and any model of timm by its name. Needs torch and timm.


def build(config: SwinConfig, attention: str) -> nn.Module:
    """`timm.models.SwinTransformer` or `SwinTransformerV2`, as `timm.create_model` makes it.

    `drop_rate` is timm's argument of that name, the dropout before the head. Another image size
    leaves the window as it is, as `create_model(name, img_size=...)` does.
    """
    declare_missing_operators()
    from timm.models.swin_transformer import SwinTransformer
    from timm.models.swin_transformer_v2 import SwinTransformerV2

    arguments = _arguments(config)
    module: nn.Module
    if config.version == 1:
        module = SwinTransformer(**arguments)
        set_attention(module, fused=attention == "sdpa")
    else:
        module = SwinTransformerV2(**arguments, pretrained_window_sizes=config.pretrained_windows)
    return module


def _arguments(config: SwinConfig) -> dict[str, Any]:
    return {
        "img_size": config.image_size,
        "patch_size": config.patch_size,
        "in_chans": config.in_channels,
        "num_classes": config.num_classes,
        "embed_dim": config.embed_dim,
        "depths": config.depths,
        "num_heads": config.num_heads,
        # One pair per stage: timm reads two bare numbers as one window's height and width.
        "window_size": tuple((window, window) for window in config.windows),
        "mlp_ratio": config.mlp_ratio,
        "qkv_bias": config.qkv_bias,
        "drop_rate": config.drop_rate,
        "attn_drop_rate": config.attn_drop_rate,
        "drop_path_rate": config.drop_path_rate,
    }


def set_attention(model: nn.Module, fused: bool) -> bool:
    """Sets on this model what `timm.layers.set_fused_attn` sets for all later models. Returns
    whether the model has such a switch."""
    switches = [module for module in model.modules() if hasattr(module, "fused_attn")]
    for module in switches:
        module.fused_attn = fused  # type: ignore[assignment]
    return bool(switches)


# Any model of timm, by its name. Needs torch and timm.

# The classes of a model whose published weights end in features, without a classifier.
NUM_CLASSES = 1000


def names() -> list[str]:
    declare_missing_operators()
    import timm

    return list(timm.list_models())


def look_up(name: str) -> dict[str, Any]:
    """The fields of a `NamedModel`, from the weights that timm has for `name`.

    Raises UsageError for a name that timm does not have.
    """
    declare_missing_operators()
    import timm

    architecture = name.partition(".")[0]
    if not timm.is_model(architecture):
        raise unknown_name("model of timm", name, names(), timm_hint(name))
    try:
        weights = timm.models.get_pretrained_cfg(name)
    except RuntimeError:  # timm raises it for an unknown tag
        tags = [tag for tag in timm.list_pretrained(f"{architecture}.*") if "." in tag]
        raise unknown_name(
            f"weights of timm's {architecture}", name, tags, f"Omit the tag: timm:{architecture}."
        ) from None
    if weights is None:
        way_out = "Name a factory of yours, package.module:factory, that calls timm.create_model."
        raise UnsupportedError(f"timm does not say which images {name} takes.", way_out)
    channels, *size = weights.input_size
    return {
        "task": "classification",
        "image_size": tuple(size),
        "in_channels": channels,
        "num_classes": weights.num_classes or NUM_CLASSES,
    }


def build_named(model: NamedModel, attention: str) -> nn.Module:
    """`timm.create_model` without weights. A model with a fixed image size gets it.

    Raises UnsupportedError for an `attention` other than the library's default if the model has
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


def timm_hint(name: str) -> str:
    """The way out for a name that is no Swin's: a list of names that begin with the same word."""
    kind = re.match("[a-z]*", re.split("[:/]", name.lower())[-1])
    listed = f"'planner models {kind[0]}'" if kind and kind[0] else "'planner models TEXT'"
    return f"Any model of timm works, as timm:NAME; {listed} lists names."
