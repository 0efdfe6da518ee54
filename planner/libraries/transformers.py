"""Any model of transformers that computes its loss, by its class or from a configuration.

Nothing is downloaded: a class has the sizes of its default configuration, a folder those of its
`config.json`, and a Swin of the hub those of `HUB`. Needs torch and transformers.
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

# The image sizes for configurations without one: ImageNet's, and the crop that SegFormer and
# UperNet are trained with on ADE20K (arXiv 2105.15203 §4.1, 1807.10221).
IMAGE_SIZE, SEGMENTATION_SIZE = 224, 512
# Tokens of a training sequence: BERT's number, or fewer if the model has fewer positions.
SEQUENCE_LENGTH = 512
# The endings of the names of classes whose batch is known (`planner.training.tasks.lookup`).
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
    """The fields of a `NamedModel`, from the configuration of `name`.

    Raises UsageError for a name of no class and no configuration, and UnsupportedError for a class
    whose batch is not known.
    """
    kind, config = _load_class_and_config(name, {})
    form = find_form(kind)
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


def find_form(kind: type[Any]) -> str | None:
    """The one of `FORMS` that the name of the class ends with."""
    return next((form for form in FORMS if kind.__name__.endswith(form)), None)


def build_named(model: NamedModel, attention: Attention) -> nn.Module:
    """The class with its configuration, and random weights.

    The model's fields replace the image size, the number of labels and the channels of the
    configuration. Raises UnsupportedError for sdpa if the class has none.
    """
    changes = {
        "image_size": model.image_size,
        "num_channels": model.in_channels,
        "num_labels": model.num_classes,
        "num_frames": model.num_frames,
    }
    kind, config = _load_class_and_config(model.name, changes)
    if attention == "sdpa" and not kind._supports_sdpa:
        raise UnsupportedError(
            f"transformers' {kind.__name__} has no sdpa, and attention is sdpa.",
            "Omit --attention.",
        )
    if attention != "library":
        config._attn_implementation = attention
    module: nn.Module = kind(config)
    return module


def _to_config_value(value: Any, original: object) -> Any:
    """`value` in the form of `original`: a square image is one side, unless that has both sides."""
    is_square = isinstance(value, tuple) and value[0] == value[1]
    return value[0] if is_square and not isinstance(original, list | tuple) else value


def _load_class_and_config(name: str, changes: dict[str, Any]) -> tuple[Any, Any]:
    """The class that `name` means, and its configuration with those of `changes` that it has."""
    file = configuration_file(name)
    fields = parse_json(read_text(file, MAX_MODEL_BYTES), str(file)) if file else HUB.get(name, {})
    kind = _find_class(_architecture(fields, file or name) if file or fields else name)
    config = kind.config_class.from_dict(fields)
    for field, value in changes.items():
        if value is not None and (field == "num_labels" or hasattr(config, field)):
            setattr(config, field, _to_config_value(value, getattr(config, field, None)))
    return kind, config


def _architecture(fields: Mapping[str, Any], file: Path | str) -> str:
    names = fields.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise UsageError(
            f"{file} does not say which class it configures.",
            'Add it to the file, as "architectures": ["ViTForImageClassification"].',
        )
    return names[0]


def _find_class(name: str) -> Any:
    declare_missing_operators()
    import transformers

    if name.startswith("_") or name not in dir(transformers):
        classes = [name for name in dir(transformers) if name.endswith(FORMS)]
        raise unknown_name(
            "model of transformers", name, classes,
            "Name a class of transformers, or a folder with a config.json: nothing is downloaded.",
        )  # fmt: skip
    kind = getattr(transformers, name)
    if getattr(kind, "config_class", None) is None or not issubclass(kind, nn.Module):
        raise UsageError(
            f"transformers' {name} is no model with a configuration.",
            "Name a class as ViTForImageClassification.",
        )
    return kind
