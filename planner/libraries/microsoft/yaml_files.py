"""The authors' own configuration files (github.com/microsoft/Swin-Transformer, configs/*.yaml)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.core.errors import UnsupportedError, UsageError, shorten
from planner.libraries.spec import IMAGENET_1K, IMAGENET_22K

# What their config.py sets before a file is read, where it is not what a SwinConfig has too.
DEFAULT_DROP_PATH = 0.1
SECTIONS = {"swin": ("SWIN", 1), "swinv2": ("SWINV2", 2)}
CLASSES = {"imagenet": IMAGENET_1K, "imagenet22K": IMAGENET_22K}
MAX_FAULTS = 20  # said at once
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
    """Whether a file's fields are the authors' and not a SwinConfig's."""
    return isinstance(data.get("MODEL"), dict)


def read_authors_file(data: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The fields of a SwinConfig that one of the authors' files means.

    The class count follows from the data set, as it does there. Raises UsageError, or
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
    own = _section(model, section, source)
    faults = sorted(set(own) - set(FIELDS) - {"QK_SCALE"})
    if own.get("QK_SCALE") is not None:
        faults.append("QK_SCALE")
    if faults:
        listed = ", ".join(faults[:MAX_FAULTS]) + (", …" if len(faults) > MAX_FAULTS else "")
        raise UnsupportedError(f"{source} sets fields that are not supported: {listed}.")
    return {
        "library": "microsoft",
        "name": model.get("NAME", Path(source).stem),
        "version": version,
        "image_size": dataset.get("IMG_SIZE", 224),
        "num_classes": _num_classes(model, dataset, source),
        "drop_rate": model.get("DROP_RATE", 0.0),
        "drop_path_rate": model.get("DROP_PATH_RATE", DEFAULT_DROP_PATH),
        **{FIELDS[key]: value for key, value in own.items() if key in FIELDS},
    }


def _section(data: Mapping[str, Any], name: str, source: str) -> dict[str, Any]:
    """The fields of a section, none where it is not there. Raises UsageError."""
    section = data.get(name) or {}
    if not isinstance(section, dict):
        raise UsageError(
            f"{source}: {name} is a section with fields of its own, not {shorten(section)}."
        )
    return {str(field): value for field, value in section.items()}


def _num_classes(model: Mapping[str, Any], dataset: Mapping[str, Any], source: str) -> object:
    """Their data loader overwrites NUM_CLASSES for the data sets that it knows."""
    name = dataset.get("DATASET", "imagenet")
    if isinstance(name, str) and name in CLASSES:
        return CLASSES[name]
    if "NUM_CLASSES" not in model:
        raise UsageError(
            f"{source} names the data set {shorten(name)}, whose class count is not known.",
            "Set MODEL.NUM_CLASSES in it.",
        )
    return model["NUM_CLASSES"]
