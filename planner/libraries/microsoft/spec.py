"""The spec of the authors' Swin (github.com/microsoft/Swin-Transformer): its names, its abilities,
how to build its real module from a checkout, and the authors' configuration files."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from planner.core.errors import PlannerError, UnsupportedError, UsageError, shorten
from planner.core.schema import SwinConfig
from planner.core.schema.validation import MAX_FAULTS
from planner.libraries.maps import feature_maps
from planner.libraries.spec import (
    OWN_FACTORY,
    LibrarySpec,
    check_one_window,
    check_pretrained_window,
    eager_attention,
    published,
)
from planner.libraries.torchvision import declare_missing_operators

if TYPE_CHECKING:
    from torch import nn


# `published.json` has the configurations of github.com/microsoft/Swin-Transformer by the names of
# their YAML files, each with the drop path that its file sets; the class count follows from its
# data set. SimMIM, MoE and MLP configurations are other models.


# The arguments of the authors' classes for a model. No torch: an emitted script has them too.


def class_arguments(model: SwinConfig) -> dict[str, Any]:
    """The arguments of `SwinTransformer` or `SwinTransformerV2`."""
    height, width = model.image_size
    arguments: dict[str, Any] = {
        "img_size": height if height == width else (height, width),
        "patch_size": model.patch_size,
        "in_chans": model.in_channels,
        "num_classes": model.num_classes,
        "embed_dim": model.embed_dim,
        "depths": list(model.depths),
        "num_heads": list(model.num_heads),
        "window_size": model.windows[0],
        "mlp_ratio": model.mlp_ratio,
        "qkv_bias": model.qkv_bias,
        "drop_rate": model.drop_rate,
        "attn_drop_rate": model.attn_drop_rate,
        "drop_path_rate": model.drop_path_rate,
        "ape": model.absolute_position_embedding,
        "patch_norm": model.patch_norm,
    }
    if model.version == 2:
        arguments["pretrained_window_sizes"] = list(model.pretrained_windows)
    return arguments


# The folder of the authors' repository, which is no package.

CHECKOUT_VARIABLE = "SWIN_TRANSFORMER_CHECKOUT"


def named_checkout() -> Path | None:
    """The folder that the environment names; None if it names none."""
    folder = os.environ.get(CHECKOUT_VARIABLE)
    return Path(folder) if folder else None


def _faults(config: SwinConfig) -> list[str]:
    return [
        *check_one_window(config),
        *check_pretrained_window(config),
        *_check_divisibility(config),
    ]


def _check_divisibility(config: SwinConfig) -> list[str]:
    """The faults of sides that patches, windows or mergings do not divide: this library never
    pads."""
    faults = [
        f"image_size: {side} is not a multiple of patch_size {config.patch_size}, and the "
        "authors' code does not pad"
        for side in dict.fromkeys(config.image_size)
        if side % config.patch_size
    ]
    maps = feature_maps(config)
    for stage, (height, width) in enumerate(maps):
        window = min(config.windows[stage], height, width)
        if height % window or width % window:
            faults.append(
                f"window_size: {window} does not divide the feature map of stage {stage} "
                f"({height}x{width}), and the authors' code does not pad"
            )
        if stage + 1 < len(maps) and (height % 2 or width % 2):
            faults.append(
                f"image_size: stage {stage} has an odd feature map ({height}x{width}), which the "
                "authors' patch merging refuses"
            )
    return faults


SPEC = LibrarySpec(
    name="microsoft",
    title="microsoft/Swin-Transformer",
    published=published("microsoft"),
    attentions=eager_attention,
    faults=_faults,
    reentrant=("blocks",),
    find_source=named_checkout,
    refused={"simmim|_moe_|swin_mlp": "is another kind of model and is not supported."},
)

# The real module, from a checkout of github.com/microsoft/Swin-Transformer.
#
# There is no package of it: set SWIN_TRANSFORMER_CHECKOUT to the folder that `git clone` made.
# Needs torch and timm (which the authors' code imports).

FILES = {1: "models/swin_transformer.py", 2: "models/swin_transformer_v2.py"}
CLASSES = {1: "SwinTransformer", 2: "SwinTransformerV2"}


def build(config: SwinConfig, attention: str, checkout: str | Path | None = None) -> nn.Module:
    """The authors' classifier. `checkout` is the folder of their repository; without it the
    environment names the folder.

    Checkpointing blocks is their `use_checkpoint` (PyTorch's reentrant kind). Raises PlannerError
    if there is no checkout.
    """
    folder = _find_checkout(checkout)
    source = _load_file(folder / FILES[config.version])
    module: nn.Module = getattr(source, CLASSES[config.version])(**class_arguments(config))
    return module


def _find_checkout(checkout: str | Path | None) -> Path:
    folder = Path(checkout) if checkout else named_checkout()
    if folder is None:
        raise PlannerError(
            "microsoft/Swin-Transformer is not a package, so its real module needs a checkout.",
            "git clone https://github.com/microsoft/Swin-Transformer, then set "
            f"{CHECKOUT_VARIABLE} to that folder; or use native, whose checkpoints are the same.",
        )
    missing = [name for name in FILES.values() if not (folder / name).is_file()]
    if missing:
        raise PlannerError(
            f"{folder} is not a checkout of microsoft/Swin-Transformer: it has no {missing[0]}.",
            f"Set {CHECKOUT_VARIABLE} to the folder that has {missing[0]}.",
        )
    return folder


def _load_file(file: Path) -> ModuleType:
    """Imports one file of the checkout: its package would import all models and their kernels."""
    declare_missing_operators()
    name = f"_swin_transformer_checkout_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec, "every .py file has one"
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    try:
        # The file prints a line about optional kernels, and standard output may be a protocol's.
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore", FutureWarning)  # for timm.models.layers
            spec.loader.exec_module(module)
    finally:
        sys.path[:] = path  # the file appends the folder above the working directory
    return module


# The authors' configuration files (github.com/microsoft/Swin-Transformer, configs/*.yaml).

# The default of their config.py that differs from a SwinConfig's.
DEFAULT_DROP_PATH = 0.1
SECTIONS = {"swin": ("SWIN", 1), "swinv2": ("SWINV2", 2)}
NUM_CLASSES = {"imagenet": 1000, "imagenet22K": 21841}
FIELDS = {
    "PATCH_SIZE": "patch_size",
    "IN_CHANS": "in_channels",
    "EMBED_DIM": "embed_dim",
    "DEPTHS": "depths",
    "NUM_HEADS": "num_heads",
    "WINDOW_SIZE": "window_size",
    "MLP_RATIO": "mlp_ratio",
    "QKV_BIAS": "qkv_bias",
    "APE": "absolute_position_embedding",
    "PATCH_NORM": "patch_norm",
    "PRETRAINED_WINDOW_SIZES": "pretrained_window_size",
}


def is_authors_file(data: Mapping[str, Any]) -> bool:
    """Whether the fields of a file are the authors', and not a SwinConfig's."""
    return isinstance(data.get("MODEL"), dict)


def read_authors_file(data: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The fields of a SwinConfig, from those of one of the authors' files.

    The class count follows from the data set, as in their code. Raises UsageError, or
    UnsupportedError for a model that is no Swin version 1 or 2.
    """
    model, dataset = _section(data, "MODEL", source), _section(data, "DATA", source)
    if data.get("BASE") not in (None, "", [], [""]):
        raise UsageError(
            f"{source} names other files in BASE, which are not read.",
            "Write their fields into one file.",
        )
    kind = model.get("TYPE", "swin")
    if not isinstance(kind, str) or kind not in SECTIONS:
        raise UnsupportedError(
            f"{source} describes a {shorten(kind)} model, which is not supported.",
            f"Supported model types: {', '.join(SECTIONS)}.",
        )
    section, version = SECTIONS[kind]
    fields = _section(model, section, source)
    faults = sorted(set(fields) - set(FIELDS) - {"QK_SCALE"})
    if fields.get("QK_SCALE") is not None:
        faults.append("QK_SCALE")
    if faults:
        listed = ", ".join(faults[:MAX_FAULTS]) + (", …" if len(faults) > MAX_FAULTS else "")
        law = f"{source} sets fields that are not supported: {listed}."
        raise UnsupportedError(law, OWN_FACTORY)
    return {
        "library": "microsoft",
        "name": model.get("NAME", Path(source).stem),
        "version": version,
        "image_size": dataset.get("IMG_SIZE", 224),
        "num_classes": _num_classes(model, dataset, source),
        "drop_rate": model.get("DROP_RATE", 0.0),
        "drop_path_rate": model.get("DROP_PATH_RATE", DEFAULT_DROP_PATH),
        **{FIELDS[key]: value for key, value in fields.items() if key in FIELDS},
    }


def _section(data: Mapping[str, Any], name: str, source: str) -> dict[str, Any]:
    """The fields of a section; none without it. Raises UsageError."""
    section = data.get(name) or {}
    if not isinstance(section, dict):
        raise UsageError(
            f"{source}: {name} is a section with fields of its own, not {shorten(section)}.",
            "Write each field of it in a line of its own below it.",
        )
    return {str(field): value for field, value in section.items()}


def _num_classes(model: Mapping[str, Any], dataset: Mapping[str, Any], source: str) -> object:
    """The class count: the authors' data loader overwrites NUM_CLASSES for data sets it knows."""
    name = dataset.get("DATASET", "imagenet")
    if isinstance(name, str) and name in NUM_CLASSES:
        return NUM_CLASSES[name]
    if "NUM_CLASSES" not in model:
        raise UsageError(
            f"{source} names the data set {shorten(name)}, whose class count is not known.",
            "Set MODEL.NUM_CLASSES in it.",
        )
    return model["NUM_CLASSES"]
