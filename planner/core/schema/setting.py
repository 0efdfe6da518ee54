"""How one training step is run, on one device and on several."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, NewType, Self, get_args

from pydantic import ConfigDict, Field, field_validator

from planner.core.errors import Fault, UnsupportedError, alternatives
from planner.core.schema.model import MAX_SIZE
from planner.core.schema.validation import Checked, Option

# How a step is spread over devices. Defaults are PyTorch 2.13's and 2.14's
# (torch/nn/parallel/distributed.py, torch/distributed/fsdp/_fully_shard/_fully_shard.py) and
# DeepSpeed 0.19.8's (deepspeed/runtime/zero/config.py). `planner/trainers/` says what a trainer
# sets otherwise.

# What devices do together, by the names of torch.distributed.
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast"]
# Which devices take part: all, those that share one set of shards, those that hold the same shard.
Group = Literal["world", "shard", "replicate"]


Parallelism = Literal["none", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"]
PARALLELISMS: tuple[Parallelism, ...] = get_args(Parallelism)
# Parallelisms that keep a part of the weights on each device, and those that DeepSpeed runs.
SHARDED: frozenset[Parallelism] = frozenset(("fsdp", "hsdp"))
DEEPSPEED: frozenset[Parallelism] = frozenset(("zero1", "zero2", "zero3"))

Devices = Annotated[int, Field(ge=1, le=MAX_SIZE)]

SEVERAL = "Several GPUs"  # a heading of --help


class Distribution(Checked):
    """How a step is spread over `world_size` devices in all, as many on each of `nodes` machines.

    - `parallelism`: ddp copies the model and sums gradients. fsdp shards weights, gradients and the
      optimizer's state over all devices; hsdp shards them over the devices of one machine and
      copies that. zero1 shards the optimizer's state, zero2 gradients too, zero3 weights too
      (DeepSpeed's stages). none with several devices leaves communication out.
    - `gradient_sync`: last sums gradients over devices in the last micro-batch of a step, every in
      each of them (a trainer without `no_sync`).
    - `fsdp_reshard` frees weights after forward (`reshard_after_forward` of blocks; the model's own
      stay).

    fsdp and hsdp apply `fully_shard` to each block and to the model (FSDP2); they gather weights as
    they are and reduce gradients in fp32 (`MixedPrecisionPolicy`). DeepSpeed's buckets hold 25 MiB
    of fp32, as DDP's do.
    """

    world_size: Annotated[Devices, Option("GPUs in all.", heading=SEVERAL, flag="--gpus")] = 1
    nodes: Annotated[Devices, Option("Machines that hold the GPUs.", heading=SEVERAL)] = 1
    parallelism: Annotated[
        Parallelism, Option(heading=SEVERAL, values=PARALLELISMS[1:], shown="ddp on several GPUs")
    ] = "none"
    gradient_sync: Literal["last", "every"] = "last"
    fsdp_reshard: bool = True

    @property
    def devices_per_node(self) -> int:
        return self.world_size // self.nodes

    @property
    def num_copies(self) -> int:
        """The number of sets of shards; where nothing is sharded every device is a set."""
        return self.world_size // self.shard_size

    @property
    def shard_size(self) -> int:
        """The number of devices over which weights are sharded; 1 where they are not."""
        if self.parallelism == "hsdp":
            return self.devices_per_node
        return self.world_size if self.parallelism in ("fsdp", "zero3") else 1

    def _faults(self) -> Iterator[Fault]:
        if self.world_size % self.nodes:
            even = max(1, self.devices_per_node) * self.nodes
            yield Fault(
                "all nodes have equally many devices, and a world_size of "
                f"{self.world_size} cannot be split over {self.nodes} nodes",
                way_out=f"Set world_size={even}, or another multiple of {self.nodes}.",
                fields=("world_size", "nodes"),
            )
        if not self.fsdp_reshard and self.parallelism not in SHARDED:
            yield Fault(
                "fsdp_reshard is false, which belongs to parallelism fsdp or hsdp, and parallelism "
                f"is {self.parallelism}",
                way_out="Set parallelism=fsdp, or omit fsdp_reshard.",
                fields=("fsdp_reshard", "parallelism"),
            )
        is_split = self.parallelism == "hsdp" and not self.world_size % self.nodes
        if is_split and self.shard_size in (1, self.world_size):
            yield Fault(
                "hsdp needs two machines or more with two GPUs or more each, and here are "
                f"{self.world_size} on {self.nodes}",
                way_out="Set parallelism=fsdp, or parallelism=ddp.",
                fields=("nodes", "world_size"),
            )


def foreign_options(parallelism: str) -> frozenset[str]:
    """The options without a meaning under a parallelism."""
    return frozenset() if parallelism in SHARDED else frozenset(("fsdp_reshard",))


# The step of one device.

Precision = Literal["fp32", "tf32", "bf16", "fp16", "pure-bf16", "fp8"]
CompileMode = Literal[
    "off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
]
Attention = Literal["library", "eager", "sdpa"]
Loss = Literal["library", "cross-entropy", "label-smoothing", "soft-target"]
AutocastDtype = Literal["bfloat16", "float16"]
_AUTOCAST: Mapping[str, AutocastDtype] = {"bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
COMPILE_MODES: tuple[CompileMode, ...] = get_args(CompileMode)
ATTENTIONS: tuple[Attention, ...] = ("eager", "sdpa")  # that a person may choose
# One of each form: `blocks:6` stands for any number of blocks, `stages:0,1` for any stages.
CHECKPOINTINGS = (
    "none", "blocks", "blocks:6", "blocks:every-2", "selective", "stages", "stages:0,1",
)  # fmt: skip
# Compile modes that replay CUDA graphs (torch/_inductor/__init__.py, list_mode_options).
GRAPH_MODES = frozenset(("reduce-overhead", "max-autotune"))
Implementation = Literal["foreach", "fused", "forloop", "8bit"]
_IMPLEMENTATIONS: Mapping[str, Implementation] = {name: name for name in get_args(Implementation)}
# Families of optimizers: torch.optim's, except Lion, which is timm's.
OPTIMIZER_FAMILIES = ("adamw", "adam", "sgd", "adafactor", "lion", "rmsprop", "nadam", "radam")
OWN_OPTIMIZER = "own"  # the optimizer that a task makes
OPTIMIZERS = "adamw, adam, sgd, …, also with -foreach, -fused or -forloop after it."
FUSED_FAMILIES = ("adamw", "adam", "sgd")  # fused in torch 2.13 and 2.14
# What the switches of a setting stand for, from microsoft/Swin-Transformer @f82860b, config.py:
CLIP_NORM = 5.0  # TRAIN.CLIP_GRAD
LABEL_SMOOTHING = 0.1  # MODEL.LABEL_SMOOTHING
EMA_DECAY = 0.9999  # timm's default: the authors keep no average
# Fields that only a compiled step has.
COMPILED_FIELDS = ("compile_scope", "activation_memory_budget")
_OPTIMIZER = re.compile(
    rf"({'|'.join(OPTIMIZER_FAMILIES)})(-foreach|-fused|-forloop)?|adamw-8bit|{OWN_OPTIMIZER}"
)
_CHECKPOINTING = re.compile(
    r"none|blocks|blocks:[1-9][0-9]{0,3}|blocks:every-[2-9]|selective|stages"
    r"|stages:[0-9]{1,3}(,[0-9]{1,3}){0,15}"
)
Count = Annotated[int, Field(ge=1, le=MAX_SIZE)]
CountOrNone = Annotated[int, Field(ge=0, le=MAX_SIZE)]


class TrainSetting(Distribution):
    """One way to run a training step: everything that changes its memory or its speed. Fields of
    several devices are `Distribution`'s.

    - `batch_size`: the micro-batch of one device in images. An optimizer step sees
      `batch_size × accumulate × world_size` images (`global_batch`).
    - `precision`: fp8 is bf16 autocast with linear layers that multiply in 8 bits.
    - `checkpointing`: none, blocks, stages, or stages:0,1 (chosen stages, 0-based). blocks:6
      checkpoints the first six blocks, blocks:every-2 the first of every two; selective every
      block, but keeps the results of its matrix products and attention.
    - `offload`: activations keeps what backward needs in pinned memory of the host, except weights,
      buffers, the batch and scalars.
    - `compile_scope`: blocks compiles each block by itself. Below an `activation_memory_budget` of
      1 the compiler recomputes until it keeps that share of what it would keep.
    - `attention`: library is what the library does by itself on CUDA; `LibrarySpec.resolve` turns
      it into eager or sdpa.
    - `optimizer`: a family, in torch's default implementation on CUDA (foreach, for adafactor
      forloop), or a family with -foreach, -fused or -forloop. sgd has momentum 0.9; lion is timm's,
      adamw-8bit torchao's, all others are torch's.
    - `optimizer_in_backward`: each weight is updated as soon as it has its gradient.
    - `offload_optimizer`: state keeps the state of weights of 4096 elements or more on the host,
      whose processor updates them (torchao's CPUOffloadOptimizer); with state-and-gradients their
      gradients leave the device too.
    - `cudnn_benchmark`: cuDNN chooses a convolution's algorithm by trying all, after which torch
      empties the allocator's cache. timm's train.py and Microsoft's main.py (Swin-Transformer
      @00f2800) always turn it on; transformers' trainer does not.
    - `loss`, `clip_grad`: library and None are as the model's authors trained it (`with_recipe`).
    - `frozen_stages`: so many of the first stages are not trained, nor is the patch embedding.
    - `lora_rank`: from 1 on only adapters of that rank are trained, on the linear layers of
      attention (`lora_targets` all: and of the MLP), and the classifier.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch_size: Annotated[Count, Option("Images in the micro-batch of one GPU.")] = 64
    accumulate: Annotated[Count, Option("Micro-batches per step.")] = 1
    precision: Annotated[Precision, Option(shown="bf16; fp16 on a GPU without it")] = "bf16"
    checkpointing: Annotated[str, Option(values=CHECKPOINTINGS)] = "none"
    offload: Literal["none", "activations"] = "none"
    compile: Annotated[CompileMode, Option()] = "off"
    compile_scope: Literal["model", "blocks"] = "model"
    activation_memory_budget: Annotated[float, Field(ge=0, le=1)] = 1.0
    attention: Annotated[Attention, Option(values=ATTENTIONS, shown="the library's")] = "library"
    optimizer: Annotated[str, Option(OPTIMIZERS, values=OPTIMIZER_FAMILIES)] = "adamw"
    optimizer_in_backward: bool = False
    offload_optimizer: Literal["none", "state", "state-and-gradients"] = "none"
    memory_format: Literal["contiguous", "channels_last"] = "contiguous"
    cudnn_benchmark: bool = True
    loss: Loss = "library"
    clip_grad: bool | None = None
    ema: bool = False
    zero_grad_to_none: bool = True
    frozen_stages: CountOrNone = 0
    lora_rank: CountOrNone = 0
    lora_targets: Literal["attention", "all"] = "attention"

    @field_validator("checkpointing")
    @classmethod
    def _known_checkpointing(cls, value: str) -> str:
        value = value.replace(" ", "")
        if not _CHECKPOINTING.fullmatch(value):
            raise ValueError(f"must be {alternatives(CHECKPOINTINGS)}")
        return value

    @field_validator("optimizer")
    @classmethod
    def _known_optimizer(cls, value: str) -> str:
        value = value.lower().replace("_", "-")
        if not _OPTIMIZER.fullmatch(value):
            raise ValueError(
                f"must be one of {', '.join(OPTIMIZER_FAMILIES)}, "
                "by itself or with -foreach, -fused or -forloop after it, or adamw-8bit"
            )
        return value

    def _faults(self) -> Iterator[Fault]:
        yield from super()._faults()
        yield from self._compile_faults()
        yield from self._gradient_faults()
        yield from self._zero_faults()
        if self.lora_targets != "attention" and not self.lora_rank:
            law = f"lora_targets is {self.lora_targets}, and lora_rank 0 adds no adapters"
            way_out = "Set lora_rank=8, or omit lora_targets."
            yield Fault(law, way_out=way_out, fields=("lora_targets", "lora_rank"))

    def _compile_faults(self) -> Iterator[Fault]:
        """Fields of a compiled step in an eager one, and the reverse."""
        is_eager = self.compile == "off"
        if self.offload != "none" and not is_eager:
            yield Fault(
                f"offload {self.offload} moves what an eager step saves, and compile is "
                f"{self.compile}, whose compiler chooses what is saved",
                way_out="Omit offload or compile.",
                fields=("offload", "compile"),
            )
        for field in COMPILED_FIELDS:
            if is_eager and getattr(self, field) != type(self).model_fields[field].default:
                law = f"{field} is {getattr(self, field)}, and compile is off"
                way_out = f"Set compile=default, or omit {field}."
                yield Fault(law, way_out=way_out, fields=(field, "compile"))

    def _gradient_faults(self) -> Iterator[Fault]:
        """Fields that do not go with an optimizer in backward, which frees each gradient there, nor
        with torchao's CPUOffloadOptimizer 0.18, which copies it (torchao/optim/cpu_offload.py)."""
        by, does = "optimizer_in_backward", "frees each gradient as soon as it is there"
        if self.offload_optimizer != "none":
            by, does = "offload_optimizer", "copies each gradient to the host in backward"
        elif not self.optimizer_in_backward:
            return
        keeps = self.offload_optimizer == "state"
        is_second = by == "offload_optimizer" and self.optimizer_in_backward
        several = "adds up gradients over devices"
        broken: Mapping[str, tuple[bool, str]] = {
            "optimizer": (
                self.optimizer_implementation == "8bit",
                "compiles its step, which is not known to run inside backward or on the host",
            ),
            "optimizer_in_backward": (is_second, "updates in backward"),
            "clip_grad": (bool(self.clip_grad), "needs all gradients at once"),
            "precision": (self.precision == "fp16", "needs a scaler, which reads all gradients"),
            "zero_grad_to_none": (not self.zero_grad_to_none, "keeps gradients"),
            "accumulate": (self.accumulate > 1 and not keeps, "adds up gradients that are gone"),
            "world_size": (self.world_size > 1, several),
            "parallelism": (self.parallelism != "none", several),
        }
        law = f"{by} {str(getattr(self, by)).lower()} {does}"
        for field, (is_broken, why) in broken.items():
            if is_broken:
                value = f"{field} {str(getattr(self, field)).lower()} {why}"
                yield Fault(law, value, f"Omit {by}, or {field}.", (field, by))

    @property
    def num_exchanges(self) -> int:
        """The number of micro-batches of a step in which devices wait for each other: all where
        weights are sharded, in DeepSpeed's stages 2 and 3, or with gradient_sync every; else only
        the last."""
        in_each = self.gradient_sync == "every" or self.parallelism not in ("none", "ddp", "zero1")
        return self.accumulate if in_each else 1

    def _zero_faults(self) -> Iterator[Fault]:
        """Fields with which DeepSpeed 0.19.8 fails."""
        if self.parallelism in DEEPSPEED and self.memory_format == "channels_last":
            yield Fault(
                f"parallelism {self.parallelism} and memory_format channels_last: "
                "deepspeed.initialize sends each weight as bytes, which a convolution's weight in "
                "channels_last cannot be viewed as",
                way_out="Set memory_format=contiguous, or parallelism=ddp.",
                fields=("memory_format", "parallelism"),
            )
        if self.parallelism == "zero3" and self.ema:
            yield Fault(
                "ema averages whole weights on each device, which under parallelism zero3 have no "
                "elements between steps",
                way_out="Set parallelism=zero2, or omit ema.",
                fields=("ema", "parallelism"),
            )

    @property
    def global_batch(self) -> int:
        """Images that one optimizer step sees, over all devices."""
        return self.images_per_device_step * self.world_size

    @property
    def images_per_device_step(self) -> int:
        """The images of an optimizer step on one device."""
        return self.batch_size * self.accumulate

    @property
    def optimizer_family(self) -> str:
        return self.optimizer.partition("-")[0]

    @property
    def optimizer_implementation(self) -> Implementation:
        """torch's default on CUDA is foreach; for adafactor it is forloop."""
        default: Implementation = "forloop" if self.optimizer_family == "adafactor" else "foreach"
        return _IMPLEMENTATIONS.get(self.optimizer.partition("-")[2], default)

    def check_optimizer(self) -> None:
        """Raises UnsupportedError for an implementation that torch or timm does not have, and for a
        task's own optimizer where the model is no task with one."""
        if self.optimizer == OWN_OPTIMIZER:
            raise UnsupportedError(
                "optimizer 'own' stands for the one that a task makes, and this model makes none.",
                f"Choose one of {', '.join(OPTIMIZER_FAMILIES)}; a task of yours may make its own.",
            )
        if self.optimizer_implementation == "fused" and self.optimizer_family not in FUSED_FAMILIES:
            family = self.optimizer_family
            raise UnsupportedError(
                f"{family} has no fused implementation.",
                f"Choose {family}-foreach or {family}-forloop, or one of "
                f"{', '.join(f'{name}-fused' for name in FUSED_FAMILIES)}.",
            )

    @property
    def updates_beside(self) -> bool:
        """Whether gradients are used, or leave the device, as backward makes them: then nothing can
        clip all of them."""
        return self.optimizer_in_backward or self.offload_optimizer != "none"

    @property
    def needs_torchao(self) -> bool:
        """Whether torchao is needed: products in 8 bits, moments in 8 bits, or updates on the
        host."""
        is_8bit = self.precision == "fp8" or self.optimizer_implementation == "8bit"
        return is_8bit or self.offload_optimizer != "none"

    @property
    def compiles(self) -> bool:
        """Whether a compiler runs in the first step: for the model, or for adamw-8bit's updates."""
        return self.compile != "off" or self.optimizer_implementation == "8bit"

    @property
    def autocast_dtype(self) -> AutocastDtype | None:
        """The dtype in which autocast computes; None where there is no autocast."""
        return _AUTOCAST.get(self.precision)

    @property
    def checkpointed_stages(self) -> tuple[int, ...] | None:
        """The stages that `stages:0,1` names; None for every other value."""
        kind, _, stages = self.checkpointing.partition(":")
        if kind != "stages" or not stages:
            return None
        return tuple(sorted({int(s) for s in stages.split(",")}))

    @property
    def chosen_blocks(self) -> slice | None:
        """The blocks that are checkpointed in place, in every library, counted over the whole model
        in forward order: for `blocks:6` the first six, for `blocks:every-2` the first of every two,
        for `selective` all. None for every other value."""
        kind, _, part = self.checkpointing.partition(":")
        if kind == "selective":
            return slice(None)
        if kind != "blocks" or not part:
            return None
        every = part.removeprefix("every-")
        return slice(int(part)) if every == part else slice(None, None, int(every))

    @property
    def checkpoints_any_model(self) -> bool:
        """Whether any model may have this `checkpointing`: it names blocks, or nothing."""
        return self.checkpointing.partition(":")[0] in ("none", "blocks", "selective")

    def uncompiled(self) -> Self:
        """This setting without the compiler, and without its fields."""
        plain = {field: type(self).model_fields[field].default for field in COMPILED_FIELDS}
        return self.model_copy(update={"compile": "off", **plain})

    def on_one_device(self) -> Self:
        """The step of one device by itself."""
        alone = {field: info.default for field, info in Distribution.model_fields.items()}
        return self.model_copy(update=alone)

    def with_recipe(self, of_swin: bool) -> TrainSetting:
        """This setting with a loss and a clipping where it leaves them open: for a Swin those of
        its authors (config.py: AUG.MIXUP and CUTMIX, so soft targets, and TRAIN.CLIP_GRAD), for any
        other model plain cross-entropy and none."""
        recipe: dict[str, object] = {}
        if self.loss == "library":
            recipe["loss"] = "soft-target" if of_swin else "cross-entropy"
        if self.clip_grad is None:
            recipe["clip_grad"] = of_swin and not self.updates_beside
        return self.model_copy(update=recipe) if recipe else self

    def without_recipe(self, of_swin: bool) -> TrainSetting:
        """This setting with loss and clipping left open, if `with_recipe` makes it this again."""
        bare = self.model_copy(update={"loss": "library", "clip_grad": None})
        return bare if bare.with_recipe(of_swin) == self else self

    def differences(self, other: TrainSetting) -> dict[str, object]:
        """The fields in which this setting is not `other`, with this one's values."""
        others = other.model_dump()
        return {k: value for k, value in self.model_dump().items() if value != others[k]}


ResolvedSetting = NewType("ResolvedSetting", TrainSetting)
"""A setting as a model's library will run it: its attention named, its faults looked for. Made by
`LibrarySpec.resolve`, or by `resolve` in `planner/estimation/estimate.py` for a model of any kind.
A copy of one (`model_copy`, `uncompiled`, `on_one_device`) is one too: it changes no field on which
the attention depends, and none to a value that the library refuses."""
