"""The models that can be trained: a Swin Transformer by its sizes, with the library whose code runs
it; any other model of a library by its name; a factory of the user's own.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
)

from planner.core.errors import Fault
from planner.core.schema.validation import RECORD_CONFIG, Checked, Option

Library = Literal["native", "timm", "microsoft"]
SWIN_LIBRARIES: tuple[Library, ...] = get_args(Library)


# The bound on every size: of a batch, an image's side, a layer's channels. No device trains a tenth
# of it, and products of sizes within it still have room in a count.
MAX_SIZE = 1 << 20
MAX_STAGES = 16
MAX_STAGE_BLOCKS = 1000
MAX_NAME = 200


def _split(value: Any, count: int = 1) -> Any:
    """`2,2,6,2` on a command line is the tuple (2, 2, 6, 2), and so is a list. A single value is
    `count` of it; with 0 it stays alone."""
    if isinstance(value, str):
        value = [part.strip() for part in value.replace("x", ",").split(",") if part.strip()]
        if not value:
            raise ValueError("give a number, or several with commas between them")
        value = value if len(value) > 1 else value[0]
    if isinstance(value, list | tuple):
        return tuple(value)
    return (value,) * count if count else value


def _version(value: Any) -> Any:
    """On a command line 2 is text."""
    return {"1": 1, "2": 2}.get(value.strip(), value) if isinstance(value, str) else value


def _one_line(value: str) -> str:
    """A name is printed, and written into comments of code: it is one line."""
    if not value.isprintable():
        raise ValueError("a name is one line without control characters")
    return value


Side = Annotated[int, Field(ge=1, le=MAX_SIZE)]
# One side stands for a square; a list is (height, width).
ImageSize = Annotated[tuple[Side, Side], BeforeValidator(lambda sides: _split(sides, 2))]
Window = Annotated[Side | tuple[Side, ...], BeforeValidator(lambda sides: _split(sides, 0))]
Rate = Annotated[float, Field(ge=0.0, lt=1.0)]
Blocks = Annotated[int, Field(ge=1, le=MAX_STAGE_BLOCKS)]
Name = Annotated[str, Field(max_length=MAX_NAME), AfterValidator(_one_line)]
PerStage = Field(max_length=MAX_STAGES)


class SwinConfig(Checked):
    """A Swin Transformer, version 1 or 2. Sizes are in pixels or tokens; rates are probabilities.

    `image_size` is (height, width) in pixels (one number means a square). `window_size` is the side
    of the attention window in tokens: one number, or one per stage (the timm `swin_s3_*` models).
    Every field can be set in a YAML or JSON file, or with `--set FIELD=VALUE`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    library: Library = "native"
    name: Name | None = Field(default=None, description="the published name this came from, if any")
    version: Annotated[Literal[1, 2], BeforeValidator(_version)] = 1
    image_size: Annotated[
        ImageSize, Option("In pixels: 384, or 256,192 (height, width).", "PX", "Model")
    ] = (224, 224)
    patch_size: Side = 4
    in_channels: Side = 3
    num_classes: Annotated[Side, Option("Number of classes.", heading="Model")] = 1000
    embed_dim: Side = 96
    depths: Annotated[tuple[Blocks, ...], PerStage, BeforeValidator(_split)] = (2, 2, 6, 2)
    num_heads: Annotated[tuple[Side, ...], PerStage, BeforeValidator(_split)] = (3, 6, 12, 24)
    window_size: Window = 7
    mlp_ratio: Annotated[float, Field(gt=0, le=1024)] = 4.0
    qkv_bias: bool = True
    drop_rate: Rate = 0.0
    attn_drop_rate: Rate = 0.0
    drop_path_rate: Annotated[
        Rate, Option("Stochastic depth.", "RATE", "Model", flag="--drop-path")
    ] = 0.1
    patch_norm: bool = True
    absolute_position_embedding: bool = False
    pretrained_window_size: Annotated[
        tuple[Annotated[int, Field(ge=0, le=MAX_SIZE)], ...], PerStage, BeforeValidator(_split)
    ] = Field(default=(0,), description="version 2: the window of pre-training, one or one a stage")

    def _faults(self) -> Iterator[Fault]:
        stages = len(self.depths)
        for field in ("num_heads", "window_size", "pretrained_window_size"):
            value = getattr(self, field)
            single_will_do = field == "pretrained_window_size" and len(value) == 1
            if isinstance(value, tuple) and len(value) != stages and not single_will_do:
                entries = "entry" if len(value) == 1 else "entries"
                law = f"{field} has {len(value)} {entries} and depths has {stages}"
                way_out = f"Give {field} {stages} values, one for each stage."
                yield Fault(law, way_out=way_out, fields=(field, "depths"))
        for stage, heads in enumerate(self.num_heads[:stages]):
            channels = self.stage_channels(stage)
            if channels % heads:
                yield Fault(
                    f"num_heads[{stage}] = {heads} does not divide the stage's {channels} channels "
                    f"(embed_dim × 2^{stage})",
                    way_out="Choose num_heads that divide these, or another embed_dim.",
                    fields=("num_heads", "embed_dim"),
                )
        if self.embed_dim * self.mlp_ratio < 1:
            yield Fault(
                f"mlp_ratio {self.mlp_ratio:g} leaves the first stage's MLP no channel "
                f"(embed_dim {self.embed_dim} × {self.mlp_ratio:g})",
                way_out="Set mlp_ratio=4, or a larger embed_dim.",
                fields=("mlp_ratio", "embed_dim"),
            )
        if min(self.image_size) < self.patch_size:
            yield Fault(
                f"image_size {self.image_size[0]}x{self.image_size[1]} is smaller than one patch "
                f"(patch_size {self.patch_size})",
                way_out="Choose a larger image_size, or a smaller patch_size.",
                fields=("image_size", "patch_size"),
            )

    @property
    def num_stages(self) -> int:
        return len(self.depths)

    @property
    def windows(self) -> tuple[int, ...]:
        """The window's side in tokens, one per stage (before any clamping to the feature map)."""
        window = self.window_size
        return window if isinstance(window, tuple) else (window,) * self.num_stages

    @property
    def pretrained_windows(self) -> tuple[int, ...]:
        """Version 2: the window of pre-training per stage, 0 where there was none."""
        windows = self.pretrained_window_size
        return windows if len(windows) == self.num_stages else windows * self.num_stages

    def stage_channels(self, stage: int) -> int:
        """Channels of the blocks of `stage` (0-based)."""
        return self.embed_dim << stage

    def drop_path_rates(self) -> tuple[tuple[float, ...], ...]:
        """The drop-path probability of each block, per stage: 0 rising linearly to the rate."""
        total = sum(self.depths)
        step = self.drop_path_rate / (total - 1) if total > 1 else 0.0
        rates = iter([i * step for i in range(total)])
        return tuple(tuple(next(rates) for _ in range(depth)) for depth in self.depths)

    @property
    def title(self) -> str:
        """How the model is called in reports: `timm:swin_tiny_patch4_window7_224`."""
        return f"{self.library}:{self.name or 'custom'}"


# Every model below builds its validator when it is first used: an estimate must answer at once.

NamedLibrary = Literal["timm", "torchvision", "transformers"]
NAMED_LIBRARIES: tuple[NamedLibrary, ...] = get_args(NamedLibrary)
# What a step of a model trains decides its batch and its loss (`planner.training.tasks`).
TaskName = Literal["classification", "video", "segmentation", "detection", "own-loss"]

_DOTTED = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_FACTORY = re.compile(rf"{_DOTTED}:{_DOTTED}")


def is_factory(text: str) -> bool:
    """Whether `text` is `package.module:name` or `package.module:Class.method`: names, no code."""
    words = re.split("[.:]", text)
    return _FACTORY.fullmatch(text) is not None and not any(map(keyword.iskeyword, words))


class NamedModel(BaseModel):
    """A model that an installed library builds by its name, and that is no `SwinConfig`.

    - `name`: the library's own: `vit_base_patch16_224` of timm, `swin3d_t` of torchvision; of
      transformers a class (`ViTForImageClassification`), or a folder or `config.json` with a
      configuration, whose digest is `config_sha256`.
    - `task`: what a step of it trains. An `own-loss` model computes its loss itself, as those of
      transformers do.
    - Sizes without a meaning for a model are None: the image of a language model, the
      `sequence_length` (tokens) of a vision model, the `num_frames` of a model of single images.
    """

    model_config = RECORD_CONFIG

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
        """Whether a script can build the model in one call, and train it from images to logits."""
        return self.task == "classification"

    @property
    def title(self) -> str:
        """How the model is called in reports: `timm:vit_base_patch16_224`."""
        return f"{self.library}:{self.name}"


class FactoryModel(BaseModel):
    """A model of the user's own: `package.module:factory`, called without arguments.

    `image_size`, `in_channels` and `num_classes` describe the batch of a factory that returns a
    module from images to logits. A factory that returns a `Task` makes its own batch.
    """

    model_config = RECORD_CONFIG

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
    """What the items of a model's batch are called, where its task does not name them."""
    tasks = {"video": "clips", "own-loss": "samples"}
    return tasks.get(model.task, "images") if isinstance(model, NamedModel) else "images"
