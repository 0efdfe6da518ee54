"""timm's own Swin, built from a SwinConfig. Needs torch and timm."""

from __future__ import annotations

from typing import Any

from torch import nn

from planner.core.errors import UnsupportedError, unknown_name
from planner.core.schema import NamedModel, SwinConfig
from planner.core.schema.setting import Attention
from planner.libraries.building import declare_missing_operators
from planner.libraries.named import any_of_timm


def build(config: SwinConfig, attention: Attention) -> nn.Module:
    """`timm.models.SwinTransformer` or `SwinTransformerV2`, as `timm.create_model` would make it.

    `drop_rate` is timm's argument of that name, the dropout before the head. Another image size
    leaves the window as it is, as `create_model(name, img_size=...)` does.
    """
    declare_missing_operators()
    from timm.models.swin_transformer import SwinTransformer
    from timm.models.swin_transformer_v2 import SwinTransformerV2

    arguments = _arguments(config)
    model: Any
    if config.version == 1:
        model = SwinTransformer(**arguments)
        set_attention(model, fused=attention == "sdpa")
    else:
        model = SwinTransformerV2(**arguments, pretrained_window_sizes=config.pretrained_windows)
    built: nn.Module = model
    return built


def _arguments(config: SwinConfig) -> dict[str, Any]:
    return {
        "img_size": config.image_size,
        "patch_size": config.patch_size,
        "in_chans": config.in_channels,
        "num_classes": config.num_classes,
        "embed_dim": config.embed_dim,
        "depths": config.depths,
        "num_heads": config.num_heads,
        # One pair a stage: timm reads two bare numbers as one window's height and width.
        "window_size": tuple((window, window) for window in config.windows),
        "mlp_ratio": config.mlp_ratio,
        "qkv_bias": config.qkv_bias,
        "drop_rate": config.drop_rate,
        "attn_drop_rate": config.attn_drop_rate,
        "drop_path_rate": config.drop_path_rate,
    }


def set_attention(model: nn.Module, fused: bool) -> bool:
    """What `timm.layers.set_fused_attn` sets for models built after it, on this model only; whether
    it has anything to set."""
    switches = [module for module in model.modules() if hasattr(module, "fused_attn")]
    for module in switches:
        module.fused_attn = fused  # type: ignore[assignment]
    return bool(switches)


# Any model of timm, by its name. Needs torch and timm.

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


def build_named(model: NamedModel, attention: Attention) -> nn.Module:
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
