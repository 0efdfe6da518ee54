"""How a training step is spread over devices: the fields of a setting that speak of more than one.

Defaults are PyTorch 2.13's (torch/nn/parallel/distributed.py,
torch/distributed/fsdp/_fully_shard/_fully_shard.py) and DeepSpeed 0.19.8's
(deepspeed/runtime/zero/config.py). What a trainer sets otherwise is said where it is written
(`planner/trainers/`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, Field

from planner.core.schema.model import MAX_SIZE
from planner.core.schema.validation import Fault, Option

# What devices do together, by the names of torch.distributed.

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast"]
# Which devices take part: all, those that share one set of shards, those that hold the same shard.
Group = Literal["world", "shard", "replicate"]


Parallelism = Literal["none", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"]
PARALLELISMS: tuple[Parallelism, ...] = get_args(Parallelism)
# Those that keep a part of the weights on each device, and those that DeepSpeed runs.
SHARDED: frozenset[Parallelism] = frozenset(("fsdp", "hsdp"))
DEEPSPEED: frozenset[Parallelism] = frozenset(("zero1", "zero2", "zero3"))

Devices = Annotated[int, Field(ge=1, le=MAX_SIZE)]

SEVERAL = "Several GPUs"  # a heading of --help
# What each option belongs to, by how its name begins.
_OPTIONS_OF: Mapping[str, frozenset[Parallelism]] = {
    "ddp_": frozenset(("ddp",)), "fsdp_": SHARDED,
}  # fmt: skip


def owners(field: str) -> frozenset[Parallelism]:
    """The kinds of parallelism that a field belongs to."""
    own = (found for prefix, found in _OPTIONS_OF.items() if field.startswith(prefix))
    return next(own, frozenset(PARALLELISMS))


class Distribution(BaseModel):
    """`world_size` devices in all, as many on each of `nodes` machines.

    `parallelism` ddp copies the model and sums gradients; fsdp shards weights, gradients and the
    optimizer's state over all devices, hsdp over `fsdp_shard_size` of them (0: those of one
    machine) and copies that; zero1 shards the optimizer's state, zero2 gradients too, zero3 weights
    too (DeepSpeed's stages). none with several devices leaves communication out.
    `gradient_sync` last sums gradients over devices in the last micro-batch of a step, every in
    each of them (a trainer without `no_sync`).

    ddp: `ddp_bucket_view` is `gradient_as_bucket_view`; with `ddp_compression` gradients cross in
    16 bits (`fp16_compress_hook`, `bf16_compress_hook`).
    fsdp, hsdp: `fully_shard` of each block and of the model (FSDP2); `fsdp_reshard` frees weights
    after forward (`reshard_after_forward` of blocks; the model's own stay). Weights are gathered
    as they are, and gradients reduced in fp32 (`MixedPrecisionPolicy`).
    zero: buckets hold 25 MiB of fp32, as DDP's.
    """

    world_size: Annotated[Devices, Option("GPUs in all.", heading=SEVERAL, flag="--gpus")] = 1
    nodes: Annotated[Devices, Option("Machines that hold the GPUs.", heading=SEVERAL)] = 1
    parallelism: Annotated[
        Parallelism, Option(heading=SEVERAL, values=PARALLELISMS[1:], shown="ddp on several GPUs")
    ] = "none"
    gradient_sync: Literal["last", "every"] = "last"
    ddp_bucket_view: bool = False
    ddp_compression: Literal["none", "fp16", "bf16"] = "none"
    fsdp_reshard: bool = True
    fsdp_shard_size: Annotated[int, Field(ge=0, le=MAX_SIZE)] = 0

    @property
    def devices_per_node(self) -> int:
        return self.world_size // self.nodes

    @property
    def num_copies(self) -> int:
        """How many sets of shards there are; every device is one where nothing is sharded."""
        return self.world_size // self.shard_size

    @property
    def shard_size(self) -> int:
        """Over how many devices weights are sharded: 1 where they are not."""
        if self.parallelism == "hsdp":
            return self.fsdp_shard_size or self.devices_per_node
        return self.world_size if self.parallelism in ("fsdp", "zero3") else 1

    def distribution_faults(self) -> Iterator[Fault]:
        """What does not go together."""
        if self.world_size % self.nodes:
            message = (
                "all nodes have equally many devices, and a world_size of "
                f"{self.world_size} cannot be split over {self.nodes} nodes: choose a multiple of "
                f"{self.nodes}"
            )
            yield Fault(("world_size", "nodes"), message)
        for prefix, owners in _OPTIONS_OF.items():
            if self.parallelism not in owners:
                yield from self._foreign(prefix, owners)
        if self.parallelism == "hsdp" and not self.world_size % self.nodes:
            yield from self._shard_faults()

    @classmethod
    def own_options(cls, parallelism: Parallelism) -> frozenset[str]:
        """The options that a parallelism has: those of others say nothing under it."""
        prefixes = tuple(p for p, owners in _OPTIONS_OF.items() if parallelism in owners)
        return frozenset(f for f in Distribution.model_fields if f.startswith(prefixes))

    @classmethod
    def all_options(cls) -> frozenset[str]:
        """The options of every parallelism."""
        return frozenset(f for f in Distribution.model_fields if f.startswith(tuple(_OPTIONS_OF)))

    def _foreign(self, prefix: str, owners: frozenset[Parallelism]) -> Iterator[Fault]:
        for field, info in Distribution.model_fields.items():
            if field.startswith(prefix) and (value := getattr(self, field)) != info.default:
                message = (
                    f"{field} is {str(value).lower()}, which belongs to parallelism "
                    f"{' or '.join(sorted(owners))}, and parallelism is {self.parallelism}"
                )
                yield Fault((field, "parallelism"), message)

    def _shard_faults(self) -> Iterator[Fault]:
        if self.world_size % self.shard_size or self.shard_size in (1, self.world_size):
            message = (
                "hsdp shards over some devices and copies that over the others: "
                f"{self.shard_size} of {self.world_size} devices is no such share "
                "(set fsdp_shard_size to a divisor, or choose fsdp or ddp)"
            )
            yield Fault(("fsdp_shard_size", "world_size"), message)


# The fields of one device by itself.
ALONE: Mapping[str, object] = {
    name: info.default for name, info in Distribution.model_fields.items()
}
