"""Any model of transformers that computes its own loss, by its class or from a configuration.

Nothing is downloaded: a class has the sizes of its default configuration, a folder those of its
`config.json`, and a Swin of the hub those that are kept here. Needs torch and transformers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from planner.core.errors import UnsupportedError, UsageError, unknown_name
from planner.core.files import MAX_MODEL_BYTES, parse_json, read_text
from planner.core.schema import NamedModel
from planner.core.schema.setting import Attention
from planner.libraries.names import HUB, configuration_file
from planner.libraries.torchvision import declare_missing_operators

# Images where the configuration names no size: ImageNet's, and the crop that SegFormer and UperNet
# are trained with on ADE20K (arXiv 2105.15203 §4.1, 1807.10221).
IMAGE_SIZE, SEGMENTATION_SIZE = 224, 512
# Tokens of a training sequence: BERT's, and at most what the model has positions for.
SEQUENCE_LENGTH = 512
# The classes whose batch is known, by how their names end (`planner.training.tasks.transformers`).
FORMS = (
    "ForImageClassification", "ForVideoClassification", "ForSemanticSegmentation",
    "ForMaskedImageModeling", "ForMaskedLM", "ForCausalLM", "LMHeadModel",
    "ForSequenceClassification", "ForTokenClassification", "ForConditionalGeneration",
)  # fmt: skip
_OTHER_BATCH = (
    "Write a factory that returns a task with your own collator: "
    "planner.training.tasks.from_collator."
)


def look_up(name: str) -> dict[str, Any]:
    """The fields of a `NamedModel` that the configuration of `name` has.

    Raises UsageError for what names no class and no configuration, and UnsupportedError for a
    class whose batch is not known.
    """
    kind, config = _class_and_config(name, {})
    form = form_of(kind)
    if form is None or kind.main_input_name not in ("pixel_values", "input_ids"):
        raise UnsupportedError(
            f"the batch of transformers' {kind.__name__} is not known.", _OTHER_BATCH
        )
    if kind.main_input_name == "input_ids":
        positions = getattr(config, "max_position_embeddings", None) or SEQUENCE_LENGTH
        return {"task": "own-loss", "sequence_length": min(SEQUENCE_LENGTH, positions)}
    vision = getattr(config, "backbone_config", None) or config
    default = SEGMENTATION_SIZE if form == "ForSemanticSegmentation" else IMAGE_SIZE
    return {
        "task": "classification" if name in HUB else "own-loss",
        "image_size": getattr(config, "image_size", None) or default,
        "in_channels": getattr(vision, "num_channels", None) or 3,
        "num_classes": config.num_labels,
        "num_frames": getattr(config, "num_frames", None),
    }


def form_of(kind: type[Any]) -> str | None:
    """How the class's name ends, among `FORMS`."""
    return next((form for form in FORMS if kind.__name__.endswith(form)), None)


def build_named(model: NamedModel, attention: Attention) -> nn.Module:
    """The class with its configuration, and random weights.

    A configuration's own size of image, number of labels and channels follow the model's fields.
    Raises UnsupportedError for sdpa where the class has none.
    """
    changes = {
        "image_size": model.image_size,
        "num_channels": model.in_channels,
        "num_labels": model.num_classes,
        "num_frames": model.num_frames,
    }
    kind, config = _class_and_config(model.name, changes)
    if attention == "sdpa" and not kind._supports_sdpa:
        raise UnsupportedError(
            f"transformers' {kind.__name__} has no sdpa, and attention is sdpa.",
            "Omit --attention.",
        )
    if attention != "library":
        config._attn_implementation = attention
    module: nn.Module = kind(config)
    return module


def _as_written(value: Any, before: object) -> Any:
    """A square image by its side, but where the configuration has both."""
    is_square = isinstance(value, tuple) and value[0] == value[1]
    return value[0] if is_square and not isinstance(before, list | tuple) else value


def _class_and_config(name: str, changes: dict[str, Any]) -> tuple[Any, Any]:
    """The class that `name` means and its configuration, what it has of `changes` set."""
    file = configuration_file(name)
    fields = parse_json(read_text(file, MAX_MODEL_BYTES), str(file)) if file else HUB.get(name, {})
    kind = _find_class(_architecture(fields, file or name) if file or fields else name)
    config = kind.config_class.from_dict(fields)
    for field, value in changes.items():
        if value is not None and (field == "num_labels" or hasattr(config, field)):
            setattr(config, field, _as_written(value, getattr(config, field, None)))
    return kind, config


def _architecture(fields: Mapping[str, Any], file: Path | str) -> str:
    named = fields.get("architectures")
    if not isinstance(named, list) or not named or not isinstance(named[0], str):
        raise UsageError(
            f"{file} does not say which class it configures.",
            'Add it to the file, as "architectures": ["ViTForImageClassification"].',
        )
    return named[0]


def _find_class(name: str) -> Any:
    declare_missing_operators()
    import transformers

    if name.startswith("_") or name not in dir(transformers):
        known = [known for known in dir(transformers) if known.endswith(FORMS)]
        raise unknown_name(
            "model of transformers", name, known,
            "Name a class of transformers, or a folder with a config.json: nothing is downloaded.",
        )  # fmt: skip
    kind = getattr(transformers, name)
    if getattr(kind, "config_class", None) is None or not issubclass(kind, nn.Module):
        raise UsageError(
            f"transformers' {name} is no model with a configuration.",
            "Name a class as ViTForImageClassification.",
        )
    return kind
