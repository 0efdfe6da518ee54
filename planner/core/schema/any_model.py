"""Any model that can be trained: a Swin of ours, a library's model by name, or a factory."""

from __future__ import annotations

import keyword
import re
from typing import Literal

from pydantic import BaseModel, Field, field_validator

from planner.core.schema.figures import KEPT
from planner.core.schema.model import ImageSize, Name, Side, SwinConfig

# Every model here builds its validator when it is first used: an estimate must answer at once.

NamedLibrary = Literal["timm", "torchvision", "transformers"]
# What one step of a model trains, and so what its batch and its loss are
# (`planner.training.tasks`).
TaskName = Literal["classification", "video", "segmentation", "detection", "own-loss"]

_DOTTED = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_FACTORY = re.compile(rf"{_DOTTED}:{_DOTTED}")


def is_factory(text: str) -> bool:
    """Whether `text` is `package.module:name`, the name perhaps `Class.method`: names, no code."""
    words = re.split("[.:]", text)
    return _FACTORY.fullmatch(text) is not None and not any(map(keyword.iskeyword, words))


class NamedModel(BaseModel):
    """A model that an installed library builds by name, and that is no Swin of ours.

    `name` is the library's own: `vit_base_patch16_224` of timm, `swin3d_t` of torchvision; of
    transformers a class (`ViTForImageClassification`), or a folder or `config.json` with a
    configuration. `task` is what a step of it trains. `own-loss` is a model that computes its loss
    itself, as those of transformers do. Sizes that mean nothing to a model are None: the image of a
    language model, the `sequence_length` (tokens) of a vision model, the `num_frames` of a model of
    single images. `config_sha256` is of the configuration file, where the name is one.
    """

    model_config = KEPT

    library: NamedLibrary
    name: Name
    task: TaskName = Field(description="required: it tells these fields from a SwinConfig's")
    image_size: ImageSize | None = None
    in_channels: Side | None = None
    num_classes: Side | None = None
    num_frames: Side | None = None
    sequence_length: Side | None = None
    config_sha256: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether a script can build it in one call, and train it from images to logits."""
        return self.library == "timm" and self.task == "classification"

    @property
    def title(self) -> str:
        """How the model is called in reports: `timm:vit_base_patch16_224`."""
        return f"{self.library}:{self.name}"


class FactoryModel(BaseModel):
    """A model of the user's own: `package.module:factory`, called without arguments.

    `image_size`, `in_channels` and `num_classes` describe the batch of a factory that returns a
    module from images to logits. A factory that returns a `Task` makes its own batch.
    """

    model_config = KEPT

    factory: str
    image_size: ImageSize = (224, 224)
    in_channels: Side = 3
    num_classes: Side = 1000

    @field_validator("factory")
    @classmethod
    def _names(cls, value: str) -> str:
        if not is_factory(value):
            raise ValueError("a factory is written package.module:name")
        return value

    @property
    def parts(self) -> tuple[str, str]:
        """(the module, the name in it)"""
        module, _, name = self.factory.partition(":")
        return module, name

    @property
    def title(self) -> str:
        return self.factory


Model = SwinConfig | NamedModel | FactoryModel


def unit_of(model: Model) -> str:
    """What a batch of the model counts where its task does not say it."""
    tasks = {"video": "clips", "own-loss": "samples"}
    return tasks.get(model.task, "images") if isinstance(model, NamedModel) else "images"
