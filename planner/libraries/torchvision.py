"""Any model of torchvision, by its name, which imports torch and torchvision; and how torchvision
is imported beside a torch that it was not built for. Imports neither by itself."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.core.errors import UnsupportedError, unknown_name
from planner.core.schema import NamedModel
from planner.core.schema.setting import Attention

if TYPE_CHECKING:
    from torch import nn

# torchvision beside a torch that its compiled operators were not built for.
#
# PyPI's torchvision is a CUDA build. Beside a CPU torch its library does not load, and `import
# torchvision` fails because the operators it describes do not exist. Declaring their schemas first
# is enough: torchvision and timm import, and their Swins never call them.

SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}

# A library's declarations vanish with it, so it must live as long as the process.
_declared: list[Any] = []


def declare_missing_operators() -> None:
    """Make `import torchvision` (and timm, which imports it) work; harmless where it did already.

    Call it before the first import of torchvision or timm. Raises nothing.
    """
    import torch

    if _declared or _compiled_operators_load():
        return
    # FRAGMENT and not DEF: another program's declaration of the same library may stand already.
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)
    _declared.append(library)


def _compiled_operators_load() -> bool:
    """Whether torchvision is absent, or brings operators that this torch can load (tried here)."""
    import torch

    found = importlib.util.find_spec("torchvision")
    if found is None or not found.submodule_search_locations:
        return True
    folder = Path(found.submodule_search_locations[0])
    for library in sorted((*folder.glob("_C*.so"), *folder.glob("_C*.pyd"))):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            continue
        return True
    return False


# Any model of torchvision, by its name.

# What a clip of a video model holds, in frames: the builders' own temporal size (mvit), and the
# clip length of torchvision's reference training (references/video_classification).
NUM_FRAMES = 16
# Detectors resize every image by themselves; this is what COCO's mostly are (height, width).
DETECTION_SIZE = (480, 640)
_MVIT_CLIP = (224, 224, NUM_FRAMES)  # which mvit's builders fix
_TASKS = {"video": "video", "segmentation": "segmentation", "detection": "detection"}
_FLOW = "estimates the flow between two images, which have a loss of their own"
_KEYPOINTS = "is trained on keypoints, which the planner has no batch of"


def names() -> list[str]:
    return list(_models().list_models())


def look_up(name: str) -> dict[str, Any]:
    """The fields of a `NamedModel` that torchvision knows of `name`: its weights' images.

    Raises UsageError for a name that torchvision does not have, and UnsupportedError for a model
    whose training step is not known.
    """
    models = _models()
    if name not in names():
        way_out = "'planner models torchvision:' lists them."
        raise unknown_name("model of torchvision", name, names(), way_out)
    kind = _kind(name)
    reason = _FLOW if kind == "optical_flow" else _KEYPOINTS if "keypoint" in name else None
    if reason is not None:
        raise UnsupportedError(
            f"torchvision:{name} {reason}.",
            "Write a factory of your own that returns a task: planner.training.tasks.from_example.",
        )
    weights = models.get_model_weights(name).DEFAULT
    return {
        "task": _TASKS.get(kind, "classification"),
        "image_size": DETECTION_SIZE if kind == "detection" else _image_size(weights.transforms()),
        "in_channels": 3,
        "num_classes": len(weights.meta["categories"]),
        "num_frames": NUM_FRAMES if kind == "video" else None,
    }


def build_named(model: NamedModel, attention: Attention) -> nn.Module:
    """`torchvision.models.get_model` without weights; one of a fixed image size is told which.

    `attention` is a matter of the step (`Step.attention_context`): torchvision has no switch.
    """
    models = _models()
    if model.in_channels != 3:
        raise UnsupportedError(
            f"torchvision's models take 3 channels, and in_channels is {model.in_channels}.",
            "Omit in_channels, or name a factory of your own.",
        )
    arguments: dict[str, Any] = {"num_classes": model.num_classes, **_sizes(model)}
    if model.task in ("segmentation", "detection"):
        arguments["weights_backbone"] = None
    module: nn.Module = models.get_model(model.name, weights=None, **arguments)
    return module


def _sizes(model: NamedModel) -> dict[str, Any]:
    """The arguments by which a builder is told the size of its images."""
    assert model.image_size is not None
    height, width = model.image_size
    family = _models().get_model_builder(model.name).__module__.rpartition(".")[2]
    if family == "vision_transformer":
        if height != width:
            raise UnsupportedError(
                f"{model.title} takes square images, and image_size is {height}x{width}.",
                f"Choose --image-size {min(height, width)}.",
            )
        return {"image_size": height}
    if family == "maxvit":
        return {"input_size": (height, width)}
    clip = (height, width, model.num_frames)
    if family == "mvit" and clip != _MVIT_CLIP:
        raise UnsupportedError(
            f"torchvision builds {model.name} for clips of {_MVIT_CLIP} (height, width and "
            f"frames), and these are {clip}.",
            "Omit --image-size, or name a factory of your own that calls "
            "torchvision.models.video.MViT.",
        )
    return {}


def _kind(name: str) -> str:
    """`video` of `torchvision.models.video.resnet`; "" of a classifier."""
    parts = _models().get_model_builder(name).__module__.split(".")
    return parts[2] if len(parts) > 3 else ""


def _image_size(transforms: Any) -> tuple[int, int]:
    """What the weights' own transforms crop images to, or else resize them to."""
    size = list(getattr(transforms, "crop_size", None) or transforms.resize_size)
    return (size[0], size[-1])


def _models() -> Any:
    declare_missing_operators()
    import torchvision

    return torchvision.models
