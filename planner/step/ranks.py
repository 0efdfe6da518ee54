"""One rank of several GPUs, from the ledger of one GPU: what DDP and FSDP2 add, in closed form.

Bytes, with P those of all trained weights, U those of one unit (a block, or what is left of the
model) and n the ranks that share one set of shards:

    DDP     one GPU's + P, its buckets, whatever the number of GPUs
    FSDP2   weights, gradients and the optimizer's state / n; and while a unit runs its weights, U,
            beside what was gathered for the next, U, or its gradients as they are summed, U

The collectives follow the order in which a step meets the units (`Sent`, `Awaited`). torch pads the
rows of a weight that n does not divide; here each weight is divided as if it were one row. Buckets
that NCCL holds longer under DDP are not among the events: the ledger's `late_bytes` has them. A
recording of torch's own DDP and FSDP2 has all of it (`planner.recording`).

After torch/nn/parallel/distributed.py, torch/csrc/distributed/c10d/reducer.cpp and
torch/distributed/fsdp/_fully_shard of torch 2.15.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeGuard

from planner.core.schema import TrainSetting
from planner.core.schema.setting import SHARDED, Collective, Group
from planner.core.units import MIB, format_bytes
from planner.ledger.ledger import (
    LEDGER_MICRO_BATCHES,
    Allocated,
    Awaited,
    Category,
    Computed,
    Event,
    Freed,
    Ledger,
    PhaseEnded,
    Scratch,
    Sent,
    Tagged,
)
from planner.step.tensor import DTYPE_BYTES

# `_DEFAULT_FIRST_BUCKET_BYTES` and `bucket_cap_mb`.
FIRST_BUCKET_BYTES, BUCKET_BYTES = MIB, 25 * MIB
GATHERED, SUMMED = "all_gather_copy_in", "reduce_scatter"  # streams of FSDP2, with their own pools


def is_closed_form(setting: TrainSetting) -> bool:
    """Whether the closed forms hold for `setting`; if not, a recording of torch's code is needed.

    They do not hold where stages are checkpointed, which run the forward of their blocks in
    backward, or where weights are not trained, which have no gradients.
    """
    if setting.parallelism in ("none", "ddp"):
        return True
    return (
        setting.parallelism in SHARDED
        and setting.checkpoints_any_model
        and setting.offload == "none"
        and not setting.frozen_stages
        and not setting.lora_rank
    )


def rank_ledger(
    ledger: Ledger, setting: TrainSetting, blocks: Mapping[str, Collection[int]]
) -> Ledger:
    """The ledger of one rank (under FSDP2 the first, whose shards are the largest), from that of a
    single GPU. `blocks` has the modules that FSDP2 shards one by one: the storages of a module's
    weights, by its path."""
    if setting.parallelism == "ddp":
        return _DdpPass(ledger, setting).run()
    return _FsdpPass(ledger, setting, blocks).run() if setting.parallelism in SHARDED else ledger


def sharding_notes(
    setting: TrainSetting, num_blocks: int, num_outside: int, rank: int = 0
) -> tuple[str, ...]:
    """The notes on FSDP2 of a model with `num_blocks` units besides itself, and `num_outside`
    parameters in none of them, on device `rank`."""
    units = f"{num_blocks} blocks and the rest of the model"
    stay = f"the {num_outside:,} parameters outside the blocks stay"
    if not num_blocks:
        units, stay = "the model as one unit", "all parameters stay"
    elif not setting.fsdp_reshard:
        stay = "all parameters stay (fsdp_reshard=false)"
    num_copies = setting.num_copies
    copies = f", and {num_copies} such groups hold a copy each" if num_copies > 1 else ""
    return (
        f"FSDP shards {units} over {setting.shard_size} devices{copies}; {stay} whole until "
        "backward has passed them",
        f"the figures are those of rank {rank}; the first ranks have the largest shards",
    )


@dataclass(eq=False)
class _Unit:
    """Weights that one collective has: a bucket of DDP; of FSDP2 a block, or the model without its
    blocks (path ""). A weight is named by its storage on one GPU."""

    path: str = ""
    weights: dict[int, int] = field(default_factory=dict)  # with the bytes of each
    unsharded: list[int] = field(default_factory=list)  # storages of the whole weights
    pending_gather: tuple[int, int] | None = None  # storage, handle
    gradient_shards: list[int] = field(default_factory=list)  # their storages

    @property
    def num_bytes(self) -> int:
        return sum(self.weights.values())


class _RankPass:
    """One pass over the events of one GPU. It copies them into those of a rank, with changes."""

    def __init__(self, ledger: Ledger, setting: TrainSetting) -> None:
        self.ledger, self.setting = ledger, setting
        self.events: list[Event] = []
        self.num_sent = 0
        self.dtype = "bfloat16" if setting.precision == "pure-bf16" else "float32"
        self.item_bytes = DTYPE_BYTES[self.dtype]
        events = ledger.events
        requests = {e.storage: e for e in events if isinstance(e, Allocated | Scratch)}
        self.num_storages: int = max(requests)
        tags = [event for event in events if type(event) is Tagged]
        weights = [tag.storage for tag in tags if tag.category == "parameters"]
        self.weights = {storage: requests[storage].num_bytes for storage in weights}
        gradients = [tag for tag in tags if tag.category == "gradients"]
        self.weight_of = {tag.storage: tag.weight for tag in gradients}  # by gradient
        self.gradient_path = {tag.weight: requests[tag.storage].path for tag in gradients}
        self.states = {tag.storage for tag in tags if tag.category == "optimizer_state"}
        self.live_gradients: set[int] = set()  # their storages

    def phases(self) -> Iterator[tuple[str, bool, Sequence[Event]]]:
        """(phase, whether its gradients are summed over the ranks, its events). The phase's mark is
        copied as the next one is read."""
        num_micro_batches = min(self.setting.accumulate, LEDGER_MICRO_BATCHES)
        start = micro_batch = 0
        for index, event in enumerate(self.ledger.events):
            if type(event) is PhaseEnded:
                is_backward = event.phase == "backward"
                micro_batch += is_backward
                is_last = micro_batch % num_micro_batches == 0
                sums = is_last or self.setting.gradient_sync == "every"
                yield event.phase, is_backward and sums, self.ledger.events[start:index]
                self.events.append(event)
                start = index + 1

    def allocate(
        self, num_bytes: int, label: str, category: Category, path: str = "", stream: str = ""
    ) -> int:
        """Adds a new storage. Returns its number."""
        self.num_storages += 1
        self.events.append(Allocated(self.num_storages, num_bytes, label, path, stream))
        self.events.append(Tagged(self.num_storages, category))
        return self.num_storages

    def copy_events(self, events: Iterable[Event]) -> None:
        """Copies events of one GPU, but for the release of gradients that this rank has freed."""
        for event in events:
            if type(event) is Tagged and event.category == "gradients":
                self.live_gradients.add(event.storage)
            elif type(event) is Freed and event.storage in self.weight_of:
                if event.storage not in self.live_gradients:
                    continue
                self.live_gradients.remove(event.storage)
            self.events.append(event)

    def free(self, storages: Collection[int]) -> None:
        self.live_gradients.difference_update(storages)
        self.events += map(Freed, storages)

    def send(
        self, collective: Collective, num_bytes: int, path: str, group: Group = "world",
        follows: bool = True, dtype: str = "",
    ) -> int:  # fmt: skip
        """Adds a collective. Returns its handle."""
        self.num_sent += 1
        fields = num_bytes, dtype or self.dtype, group, follows, path
        self.events.append(Sent(self.num_sent, collective, *fields))
        return self.num_sent

    def copy_kernel(self, name: str, num_bytes: int, path: str = "") -> None:
        """Adds a kernel that copies."""
        self.events.append(Computed(name, "copy", self.dtype, 0, num_bytes, 1, path))


class _DdpPass(_RankPass):
    """`DistributedDataParallel`."""

    def run(self) -> Ledger:
        buckets = self.assign_buckets()
        total = sum(bucket.num_bytes for bucket in buckets)
        for phase, sums, events in self.phases():
            if sums:
                self.reduce_buckets(events, buckets)
            else:
                self.copy_events(events)
            if phase == "build":
                for bucket in buckets:
                    self.allocate(bucket.num_bytes, "DDP bucket", "gradients")
        count = f"{len(buckets)} gradient buckets" if len(buckets) > 1 else "one gradient bucket"
        note = (
            f"DistributedDataParallel in closed form: {count} of {format_bytes(total)} in all, "
            "beside the gradients and counted with them, whatever the number of GPUs; in steps "
            "shorter than 100 ms NCCL holds those of the first step longer"
        )
        return replace(
            self.ledger, events=tuple(self.events), notes=(note, *self.ledger.notes),
            late_bytes=self.ledger.late_bytes + total,
        )  # fmt: skip

    def assign_buckets(self) -> list[_Unit]:
        """`compute_bucket_assignment_by_size`: a bucket closes when it has reached its limit. The
        weights are in the order in which the first step makes their gradients."""
        buckets = [_Unit()]
        for weight in dict.fromkeys(self.weight_of.values()):
            limit = FIRST_BUCKET_BYTES if len(buckets) == 1 else BUCKET_BYTES
            if buckets[-1].num_bytes >= limit:
                buckets.append(_Unit())
            buckets[-1].weights[weight] = self.weights[weight]
            buckets[-1].path = self.gradient_path[weight]
        return buckets

    def reduce_buckets(self, events: Sequence[Event], buckets: Sequence[_Unit]) -> None:
        """A backward that sends each bucket once its last gradient is there, and awaits all."""
        last_index = {event.path: index for index, event in enumerate(events) if _has_path(event)}
        full_buckets: dict[int, list[_Unit]] = {}  # by the index of the event that fills them
        for bucket in buckets:
            paths = (self.gradient_path[weight] for weight in bucket.weights)
            index = max(last_index.get(path, 0) for path in paths)
            full_buckets.setdefault(index, []).append(bucket)
        sent = []
        for index, event in enumerate(events):
            self.copy_events((event,))
            for bucket in full_buckets.get(index, ()):
                for weight, num_bytes in bucket.weights.items():  # divided on the way
                    self.copy_kernel("aten.mul", 2 * num_bytes, self.gradient_path[weight])
                sent.append((self.send("all_reduce", bucket.num_bytes, bucket.path), bucket))
        for handle, bucket in sent:
            self.events.append(Awaited(handle))
            for num_bytes in bucket.weights.values():
                self.copy_kernel("aten.copy_", 2 * num_bytes)


class _FsdpPass(_RankPass):
    """FSDP2: `fully_shard` of each block and then of the model. n ranks share a set of shards."""

    def __init__(
        self, ledger: Ledger, setting: TrainSetting, blocks: Mapping[str, Collection[int]]
    ) -> None:
        super().__init__(ledger, setting)
        self.n = setting.shard_size
        self.group: Group = "shard" if setting.parallelism == "hsdp" else "world"
        self.blocks = {path: _Unit(path) for path in blocks}
        self.root = _Unit()
        self.units = (*self.blocks.values(), self.root)
        self.find_unit = cache(self._find_unit)
        owners = {storage: self.blocks[path] for path in blocks for storage in blocks[path]}
        for weight, num_bytes in self.weights.items():
            owners.get(weight, self.root).weights[weight] = num_bytes
        self.order: list[_Unit] = []  # of the units in forward
        self.last_gathered: list[int] = []  # the storage gathered for the last unit of forward
        self.pending_reduce: tuple[int, int] | None = None  # of whole gradients: storage, handle
        self.all_reduces: list[int] = []  # over copies of the shards: handles

    def _find_unit(self, path: str) -> _Unit:
        while path and path not in self.blocks:
            path = path.rpartition(".")[0]
        return self.blocks[path] if path else self.root

    def run(self) -> Ledger:
        for phase, sums, events in self.phases():
            if phase == "build":
                self.build(events)
            elif phase in ("forward", "backward"):
                self.run_units(events, phase == "forward", sums)
            else:
                self.update_shards(events)
            if phase == "zero_grad" and self.setting.zero_grad_to_none:
                for unit in self.units:
                    self.free(unit.gradient_shards)
                    unit.gradient_shards = []
        num_outside = self.root.num_bytes // self.item_bytes
        notes = (
            *sharding_notes(self.setting, len(self.blocks), num_outside),
            "FSDP2 in closed form: rows that the devices do not share evenly may take more",
        )
        return replace(self.ledger, events=tuple(self.events), notes=(*notes, *self.ledger.notes))

    def shard_bytes(self, num_bytes: int) -> int:
        """The bytes of a weight's shard. A tensor as small as a counter is not sharded."""
        return num_bytes if num_bytes <= 8 else -(-num_bytes // self.n)

    def unit_shard_bytes(self, unit: _Unit) -> int:
        return sum(map(self.shard_bytes, unit.weights.values()))

    def build(self, events: Sequence[Event]) -> None:
        """Weights are sharded once all are on the device."""
        end = 1 + max(n for n, e in enumerate(events) if type(e) is Tagged and e[0] in self.weights)
        self.copy_events(events[:end])
        for unit in self.units:
            for num_bytes in map(self.shard_bytes, unit.weights.values()):
                self.allocate(num_bytes, "aten.new_zeros", "parameters", unit.path)
            self.free(unit.weights)
        self.update_shards(events[end:])

    def update_shards(self, events: Sequence[Event]) -> None:
        """Copies events, with the sizes of shards. While the model is built, these are only those
        of the optimizer's state (copies of the weights, too)."""
        is_building = not self.order
        for event in events:
            if type(event) is Allocated and (not is_building or event.storage in self.states):
                event = event._replace(num_bytes=self.shard_bytes(event.num_bytes))
            elif type(event) is Computed:
                flops, num_bytes = event.flops // self.n, event.num_bytes // self.n
                event = event._replace(flops=flops, num_bytes=num_bytes)
            self.copy_events((event,))

    def run_units(self, events: Sequence[Event], is_forward: bool, sums: bool) -> None:
        """Forward or backward, unit by unit. The weights of a unit are gathered as it begins; as it
        begins in backward, those of the unit before it in forward are gathered ahead."""
        indices = [(self.find_unit(e.path), i) for i, e in enumerate(events) if _has_path(e)]
        indices = [(unit, index) for unit, index in indices if unit is not self.root]
        starts = {index: unit for unit, index in dict(reversed(indices)).items()}
        ends = {index: unit for unit, index in dict(indices).items()}
        if is_forward:
            self.order = [starts[index] for index in sorted(starts)]
            self.wait_for_unshard(self.root, True)
        for index, event in enumerate(events):
            if (unit := starts.get(index)) is not None:
                self.wait_for_unshard(unit, is_forward)
                next_units = [] if is_forward else self.order[: self.order.index(unit)][-1:]
                for next_unit in next_units:
                    if not next_unit.unsharded:
                        self.unshard(next_unit, False)
            self.copy_events((event,))
            if (unit := ends.get(index)) is not None:
                self.end_unit(unit, is_forward, sums)
        if is_forward:
            self.free(self.last_gathered)
            self.last_gathered = []
        else:
            self.end_unit(self.root, False, sums)
            self.finish_reduce()
            self.events += map(Awaited, self.all_reduces)
            self.all_reduces.clear()

    def unshard(self, unit: _Unit, follows: bool) -> None:
        """Issues the all-gather of a unit's weights (`FSDPParamGroup.unshard`)."""
        if unit.pending_gather is not None or self.n == 1:
            return
        num_bytes = self.n * self.unit_shard_bytes(unit)
        storage = self.allocate(num_bytes, "all_gather", "parameters", unit.path, GATHERED)
        handle = self.send("all_gather", num_bytes, unit.path, self.group, follows)
        unit.pending_gather = storage, handle

    def wait_for_unshard(self, unit: _Unit, is_forward: bool) -> None:
        """Copies the gathered storage into the unit's weights. In forward the storage stays until
        that of the next unit is gathered."""
        if unit.unsharded:
            return
        self.unshard(unit, is_forward and unit is self.root)
        gathered, unit.pending_gather = unit.pending_gather, None
        if is_forward:
            self.free(self.last_gathered)
        self.last_gathered = [gathered[0]] if gathered is not None and is_forward else []
        if gathered is not None:
            self.events.append(Awaited(gathered[1]))
        unit.unsharded = [
            self.allocate(num_bytes, "resize_", "parameters", unit.path)
            for num_bytes in unit.weights.values()
        ]
        self.copy_kernel("fsdp.split_with_sizes_copy", 2 * unit.num_bytes, unit.path)
        if gathered is not None and not is_forward:
            self.free(gathered[:1])

    def end_unit(self, unit: _Unit, is_forward: bool, sums: bool) -> None:
        """Frees the whole weights of a unit that has run, and sums its gradients."""
        if not is_forward or self.setting.fsdp_reshard:
            self.free(unit.unsharded)
            unit.unsharded = []
        if sums:
            self.reduce_gradients(unit)

    def reduce_gradients(self, unit: _Unit) -> None:
        """Copies all gradients of a unit in fp32, sums them over the ranks, and keeps this rank's
        shard of the sum. The copy lives until the next unit makes its own."""
        self.finish_reduce()
        shard_bytes = self.unit_shard_bytes(unit)
        fp32_bytes = shard_bytes // self.item_bytes * DTYPE_BYTES["float32"]
        whole = self.allocate(self.n * fp32_bytes, "fsdp.chunk_cat", "gradients", unit.path)
        self.copy_kernel("fsdp.chunk_cat", unit.num_bytes + self.n * fp32_bytes, unit.path)
        gradients = {storage for storage, w in self.weight_of.items() if w in unit.weights}
        self.free(sorted(self.live_gradients & gradients))
        shard = self.allocate(fp32_bytes, "reduce_scatter", "gradients", unit.path, SUMMED)
        if fp32_bytes != shard_bytes:
            cast = self.allocate(shard_bytes, "aten._to_copy", "gradients", unit.path, SUMMED)
            self.free((shard,))
            shard = cast
        if unit.gradient_shards:  # added to the shard that is there
            self.free((shard,))
        else:
            unit.gradient_shards = [shard]
        handle = 0
        fields: dict[str, Any] = {"path": unit.path, "dtype": "float32"}
        if self.n > 1:
            handle = self.send("reduce_scatter", self.n * fp32_bytes, group=self.group, **fields)
        if self.setting.num_copies > 1:
            self.all_reduces.append(
                self.send("all_reduce", fp32_bytes, group="replicate", **fields)
            )
        self.pending_reduce = whole, handle

    def finish_reduce(self) -> None:
        if self.pending_reduce is not None:
            whole, handle = self.pending_reduce
            self.events += [Awaited(handle)] if handle else []
            self.free((whole,))
            self.pending_reduce = None


def _has_path(event: Event) -> TypeGuard[Allocated | Scratch | Computed]:
    """Whether the event ran in a module."""
    return isinstance(event, Allocated | Scratch | Computed)
