"""How one training step is run."""

from __future__ import annotations

import re
from typing import Annotated, Literal, NewType

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from planner.errors import UnsupportedError
from planner.schema.faults import CrossFieldError, Fault
from planner.schema.model import MAX_SIZE

Precision = Literal["fp32", "tf32", "bf16", "fp16", "pure-bf16"]
CompileMode = Literal[
    "off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
]
Attention = Literal["library", "eager", "sdpa"]
Loss = Literal["cross-entropy", "label-smoothing", "soft-target"]

PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "bf16", "fp16", "pure-bf16")
COMPILE_MODES: tuple[CompileMode, ...] = (
    "off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs",
)  # fmt: skip
# Those that replay CUDA graphs (torch/_inductor/__init__.py, list_mode_options).
GRAPH_MODES = frozenset(("reduce-overhead", "max-autotune"))
OPTIMIZER_FAMILIES = ("adamw", "adam", "sgd", "adafactor", "lion", "rmsprop", "nadam", "radam")
FUSED_FAMILIES = ("adamw", "adam", "sgd")  # of those above, as torch 2.13 has them
# What the switches of a setting stand for. Of microsoft/Swin-Transformer @f82860b, config.py:
CLIP_NORM = 5.0  # TRAIN.CLIP_GRAD
LABEL_SMOOTHING = 0.1  # MODEL.LABEL_SMOOTHING
EMA_DECAY = 0.9999  # timm's usual one: the authors keep no average
# What a probe and every emitted trainer set, whatever the setting. timm's train.py and Microsoft's
# main.py (microsoft/Swin-Transformer @00f2800) turn it on and have no option against it.
CUDNN_BENCHMARK = True
_OPTIMIZER = re.compile(rf"({'|'.join(OPTIMIZER_FAMILIES)})(-foreach|-fused|-forloop)?")
_CHECKPOINTING = re.compile(r"none|blocks|stages|nested|stages:[0-9]{1,3}(,[0-9]{1,3}){0,15}")
Count = Annotated[int, Field(ge=1, le=MAX_SIZE)]
CountOrNone = Annotated[int, Field(ge=0, le=MAX_SIZE)]


class TrainSetting(BaseModel):
    """One way to run a training step; everything that moves its memory or its speed.

    `batch_size` is the micro-batch of one device in images; one optimizer step sees
    `batch_size × accumulate × world_size` of them (`global_batch`).
    `attention="library"` means what the library does by itself on CUDA; `resolve` in
    `planner.libraries` turns it into "eager" or "sdpa".
    `checkpointing` is none, blocks, stages, stages:0,1 (chosen stages, 0-based) or nested
    (transformers version 1: stages and, inside them, blocks).
    `optimizer` is a family, for which torch's default implementation on CUDA is meant (foreach, but
    forloop for adafactor), or a family with -foreach, -fused or -forloop. sgd has momentum 0.9;
    lion is timm's, all others are torch's.
    `frozen_stages` is how many of the first stages, and the patch embedding with them, are not
    trained. With a `lora_rank` of 1 or more only adapters of that rank are, on the linear layers of
    attention, and the classifier. `validation_batch_size` images go forward between epochs (0: no
    validation).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch_size: Count = 64
    accumulate: Count = 1
    world_size: Count = 1
    precision: Precision = "bf16"
    checkpointing: str = "none"
    compile: CompileMode = "off"
    attention: Attention = "library"
    optimizer: str = "adamw"
    memory_format: Literal["contiguous", "channels_last"] = "contiguous"
    parallelism: Literal["none", "ddp"] = "none"
    loss: Loss = "cross-entropy"
    amsgrad: bool = False
    clip_grad: bool = False
    ema: bool = False
    zero_grad_to_none: bool = True
    frozen_stages: CountOrNone = 0
    lora_rank: CountOrNone = 0
    validation_batch_size: CountOrNone = 0

    @field_validator("checkpointing")
    @classmethod
    def _known_checkpointing(cls, value: str) -> str:
        value = value.replace(" ", "")
        if not _CHECKPOINTING.fullmatch(value):
            raise ValueError("must be none, blocks, stages, stages:0,1 or nested")
        return value

    @field_validator("optimizer")
    @classmethod
    def _known_optimizer(cls, value: str) -> str:
        value = value.lower().replace("_", "-")
        if not _OPTIMIZER.fullmatch(value):
            raise ValueError(
                f"must be one of {', '.join(OPTIMIZER_FAMILIES)}, "
                "alone or with -foreach, -fused or -forloop after it"
            )
        return value

    @model_validator(mode="after")
    def _consistent(self) -> TrainSetting:
        if self.amsgrad and self.optimizer_family not in ("adam", "adamw"):
            message = f"amsgrad belongs to adam and adamw, not to {self.optimizer}"
            raise CrossFieldError([Fault(("amsgrad", "optimizer"), message)])
        return self

    @property
    def global_batch(self) -> int:
        """Images that one optimizer step sees, over all devices."""
        return self.batch_size * self.accumulate * self.world_size

    @property
    def optimizer_family(self) -> str:
        return self.optimizer.partition("-")[0]

    @property
    def optimizer_implementation(self) -> Literal["foreach", "fused", "forloop"]:
        """torch's default on CUDA is foreach; for adafactor it is forloop."""
        suffix = self.optimizer.partition("-")[2]
        if suffix in ("foreach", "fused", "forloop"):
            return suffix  # type: ignore[return-value]
        return "forloop" if self.optimizer_family == "adafactor" else "foreach"

    def check_optimizer(self) -> None:
        """Raises UnsupportedError for an implementation that torch or timm does not have."""
        if self.optimizer_implementation == "fused" and self.optimizer_family not in FUSED_FAMILIES:
            family = self.optimizer_family
            raise UnsupportedError(
                f"{family} has no fused implementation.",
                f"Choose {family}-foreach or {family}-forloop, or one of "
                f"{', '.join(f'{name}-fused' for name in FUSED_FAMILIES)}.",
            )

    @property
    def autocast_dtype(self) -> Literal["bfloat16", "float16"] | None:
        """The dtype autocast computes in, or None where there is no autocast."""
        return {"bf16": "bfloat16", "fp16": "float16"}.get(self.precision)  # type: ignore[return-value]

    @property
    def checkpointed_stages(self) -> tuple[int, ...] | None:
        """For `stages:0,1` the stages named; None for every other value."""
        kind, _, stages = self.checkpointing.partition(":")
        return tuple(sorted({int(s) for s in stages.split(",")})) if kind and stages else None

    def differences(self, other: TrainSetting) -> dict[str, object]:
        """The fields, and their values here, in which this setting is not `other`."""
        mine, theirs = self.model_dump(), other.model_dump()
        return {field: value for field, value in mine.items() if value != theirs[field]}


ResolvedSetting = NewType("ResolvedSetting", TrainSetting)
"""A setting as a model's library will run it: its attention named, its faults looked for. Made by
`LibrarySpec.resolve`, or by `estimation.resolve` for a model of any kind, and by nobody else."""
