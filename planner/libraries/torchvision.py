"""How torchvision is imported beside a torch that it was not built for; and any model of
torchvision by its name, whose look-up imports torch and torchvision. The file itself imports
neither."""

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
# torchvision` fails because the operators that it describes do not exist. It is enough to declare
# their schemas first: torchvision and timm can then be imported, and their Swins never call them.

SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}

# A library's declarations vanish with it, so it must live as long as the process.
_declared: list[Any] = []


def declare_missing_operators() -> None:
    """Makes `import torchvision` (and timm, which imports it) work. Harmless where it works
    already.

    Call this before the first import of torchvision or timm. Raises nothing.
    """
    import torch

    if _declared or _compiled_operators_load():
        return
    # FRAGMENT and not DEF: another program may have declared the same library before.
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)
    _declared.append(library)


def _compiled_operators_load() -> bool:
    """Whether torchvision is absent, or has operators that this torch can load. Loads them."""
    import torch

    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return True
    folder = Path(spec.submodule_search_locations[0])
    for library in sorted((*folder.glob("_C*.so"), *folder.glob("_C*.pyd"))):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            continue
        return True
    return False


# Any model of torchvision, by its name.

# The frames in a clip of a video model: the temporal size of mvit's builders, and the clip length
# of torchvision's reference training (references/video_classification).
NUM_FRAMES = 16
# (height, width) of most images of COCO; detectors resize every image by themselves.
DETECTION_SIZE = (480, 640)
_MVIT_CLIP = (224, 224, NUM_FRAMES)  # which mvit's builders fix
_TASKS = {"video": "video", "segmentation": "segmentation", "detection": "detection"}
_FLOW = "estimates the flow between two images, which have a loss of their own"
_KEYPOINTS = "is trained on keypoints, which the planner has no batch of"


def names() -> list[str]:
    return list(_models().list_models())


def look_up(name: str) -> dict[str, Any]:
    """The fields of a `NamedModel`, from the weights that torchvision has for `name`.

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
    """`torchvision.models.get_model` without weights. A builder with a fixed image size gets it.

    The step applies `attention` (`Step.attention_context`): torchvision has no switch for it.
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
    """The builder's arguments for the size of its images."""
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
    """The kind of a model, as `video` for `torchvision.models.video.resnet`; "" for a
    classifier."""
    parts = _models().get_model_builder(name).__module__.split(".")
    return parts[2] if len(parts) > 3 else ""


def _image_size(transforms: Any) -> tuple[int, int]:
    """The size that the transforms of the weights crop images to, or else resize them to."""
    size = list(getattr(transforms, "crop_size", None) or transforms.resize_size)
    return (size[0], size[-1])


def _models() -> Any:
    declare_missing_operators()
    import torchvision

    return torchvision.models
