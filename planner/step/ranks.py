"""One rank of several GPUs, from the ledger of one GPU: what DDP and FSDP2 add, in closed form.

Bytes, with P those of all trained weights, U those of one unit (a block, or what is left of the
model) and n the ranks that share one set of shards:

    DDP     one GPU's + P, its buckets, whatever the number of GPUs
    FSDP2   weights, gradients and the optimizer's state / n; and while a unit runs its weights, U,
            beside what was gathered for the next, U, or its gradients as they are summed, U

and what crosses, by the order in which a step meets the units (`Sent`, `Awaited`). Rows of a weight
that n does not divide are padded; here each weight is divided as if it were one row. What NCCL
holds longer under DDP is left out, and within the ledger's `late_bytes`. A recording of torch's own
DDP and FSDP2 has all of it (`planner.recording`).

After torch/nn/parallel/distributed.py, torch/csrc/distributed/c10d/reducer.cpp and
torch/distributed/fsdp/_fully_shard of torch 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from typing import Any

from planner.core.schema import TrainSetting
from planner.core.schema.setting import SHARDED, Collective, Group
from planner.core.units import MIB, format_bytes
from planner.ledger.ledger import (
    RECORDED_MICRO_BATCHES,
    Allocated,
    Awaited,
    Category,
    Computed,
    Event,
    Freed,
    Ledger,
    Marked,
    Scratch,
    Sent,
    Tagged,
)
from planner.step.tensor import DTYPE_BYTES

# `_DEFAULT_FIRST_BUCKET_BYTES` and `bucket_cap_mb`.
FIRST_BUCKET_BYTES, BUCKET_BYTES = MIB, 25 * MIB
GATHERED, SUMMED = "all_gather_copy_in", "reduce_scatter"  # streams of FSDP2's, with pools


def is_closed_form(setting: TrainSetting) -> bool:
    """Whether the closed forms hold for `setting`; else only torch's own code says what it takes.

    Stages that are checkpointed run their blocks' forward in backward, and weights that are not
    trained have no gradients.
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


def one_of_several(
    ledger: Ledger, setting: TrainSetting, blocks: Mapping[str, Collection[int]]
) -> Ledger:
    """The ledger of one rank (of FSDP2 the first, whose shards are the largest), from that of one
    GPU that trains alone. `blocks` are what FSDP2 shards each by itself: the storages of a
    module's weights, by its path."""
    if setting.parallelism == "ddp":
        return _InBuckets(ledger, setting).run()
    return _Sharded(ledger, setting, blocks).run() if setting.parallelism in SHARDED else ledger


def sharding_notes(
    setting: TrainSetting, num_blocks: int, num_outside: int, rank: int = 0
) -> tuple[str, ...]:
    """Of a model with `num_blocks` units besides itself, and `num_outside` parameters in none of
    them, on device `rank`."""
    what = f"{num_blocks} blocks and the rest of the model"
    stay = f"the {num_outside:,} parameters outside the blocks stay"
    if not num_blocks:
        what, stay = "the model as one unit", "all parameters stay"
    elif not setting.fsdp_reshard:
        stay = "all parameters stay (fsdp_reshard=false)"
    copies = setting.num_copies
    held = f", and {copies} such groups hold a copy each" if copies > 1 else ""
    return (
        f"FSDP shards {what} over {setting.shard_size} devices{held}; {stay} whole until backward "
        "has passed them",
        f"the figures are those of rank {rank}; the first ranks have the largest shards",
    )


@dataclass
class _Weight:
    """A weight, by the storage that one GPU keeps it in; `path` is where its gradient is made."""

    storage: int
    num_bytes: int
    path: str = ""
    gradients: list[int] = field(default_factory=list)  # storages, one for each optimizer step


class _Rank:
    """One pass over the events of one GPU; what this rank does otherwise is inserted."""

    def __init__(self, ledger: Ledger, setting: TrainSetting) -> None:
        self.ledger, self.setting = ledger, setting
        self.events: list[Event] = []
        self.num_storages = self.num_sent = 0
        self.item_bytes = 2 if setting.precision == "pure-bf16" else 4
        self.dtype = "bfloat16" if self.item_bytes == 2 else "float32"
        self.weights: dict[int, _Weight] = {}
        self.weight_of: dict[int, _Weight] = {}  # by the storage of a gradient
        self.live: set[int] = set()  # storages of gradients that are there
        made: dict[int, Allocated] = {}
        for event in ledger.events:
            if type(event) is Allocated:
                made[event.storage] = event
                self.num_storages = max(self.num_storages, event.storage)
            elif type(event) is Tagged and event.category == "parameters":
                weight = _Weight(event.storage, made[event.storage].num_bytes)
                self.weights[event.storage] = weight
            elif type(event) is Tagged and event.category == "gradients":
                self.weight_of[event.storage] = weight = self.weights[event.weight]
                weight.gradients.append(event.storage)
                weight.path = made[event.storage].path
            elif type(event) is Scratch:
                self.num_storages = max(self.num_storages, event.storage)

    def phases(self) -> Iterator[tuple[str, bool, Sequence[Event]]]:
        """(phase, whether its gradients are summed over the ranks, its events with their mark)."""
        parts = min(self.setting.accumulate, RECORDED_MICRO_BATCHES)
        begun = micro_batch = 0
        for place, event in enumerate(self.ledger.events):
            if type(event) is Marked:
                micro_batch += event.phase == "backward"
                is_last = micro_batch % parts == 0
                sums = event.phase == "backward" and (
                    is_last or self.setting.gradient_sync == "every"
                )
                yield event.phase, sums, self.ledger.events[begun : place + 1]
                begun = place + 1

    def allocate(
        self, num_bytes: int, label: str, category: Category, path: str = "", stream: str = ""
    ) -> int:
        self.num_storages += 1
        self.events.append(Allocated(self.num_storages, num_bytes, label, path, stream))
        self.events.append(Tagged(self.num_storages, category))
        return self.num_storages

    def follow(self, events: Iterable[Event]) -> None:
        """What one GPU does as well, but for what this rank has given back already."""
        for event in events:
            if type(event) is Tagged and event.category == "gradients":
                self.live.add(event.storage)
            elif type(event) is Freed and event.storage in self.weight_of:
                if event.storage not in self.live:
                    continue
                self.live.remove(event.storage)
            self.events.append(event)

    def free(self, storages: Iterable[int]) -> None:
        gone = list(storages)
        self.live.difference_update(gone)
        self.events += map(Freed, gone)

    def send(
        self, collective: Collective, num_bytes: int, path: str, group: Group = "world",
        follows: bool = True, dtype: str = "",
    ) -> int:  # fmt: skip
        self.num_sent += 1
        what = num_bytes, dtype or self.dtype, group, follows, path
        self.events.append(Sent(self.num_sent, collective, *what))
        return self.num_sent

    def copy(self, name: str, num_bytes: int, path: str = "") -> None:
        self.events.append(Computed(name, "copy", self.dtype, 0, num_bytes, 1, path))


class _InBuckets(_Rank):
    """`DistributedDataParallel`."""

    def run(self) -> Ledger:
        total = sum(weight.num_bytes for weight in self.trained)
        buckets = self.buckets()
        for phase, sums, events in self.phases():
            if phase == "build":
                self.follow(events[:-1])
                for bucket in buckets:
                    self.allocate(sum(w.num_bytes for w in bucket), "DDP bucket", "gradients")
            elif sums:
                self.backward(events[:-1], buckets)
            else:
                self.follow(events[:-1])
            self.follow(events[-1:])
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

    @property
    def trained(self) -> list[_Weight]:
        """In the order in which the first step has their gradients."""
        return list({id(w): w for w in self.weight_of.values()}.values())

    def buckets(self) -> list[list[_Weight]]:
        """`compute_bucket_assignment_by_size`: one closes when it has reached its limit."""
        found: list[list[_Weight]] = [[]]
        for weight in self.trained:
            limit = FIRST_BUCKET_BYTES if len(found) == 1 else BUCKET_BYTES
            if sum(w.num_bytes for w in found[-1]) >= limit:
                found.append([])
            found[-1].append(weight)
        return found

    def backward(self, events: Sequence[Any], buckets: Sequence[list[_Weight]]) -> None:
        """Each bucket is sent once the last of its gradients is there, and all are awaited."""
        last = {event.path: place for place, event in enumerate(events) if _has_path(event)}
        due: dict[int, list[list[_Weight]]] = {}
        for bucket in buckets:
            due.setdefault(max(last.get(w.path, 0) for w in bucket), []).append(bucket)
        handles = []
        for place, event in enumerate(events):
            self.follow((event,))
            for bucket in due.get(place, ()):
                handles.append(self.sum(bucket))
        for handle, bucket in zip(handles, chain(*due.values()), strict=True):
            self.events.append(Awaited(handle))
            for weight in bucket:
                self.copy("aten.copy_", 2 * weight.num_bytes)

    def sum(self, bucket: Sequence[_Weight]) -> int:
        """Each gradient is divided on its way into the bucket."""
        for weight in bucket:
            self.copy("aten.mul", 2 * weight.num_bytes, weight.path)
        num_bytes, path = sum(w.num_bytes for w in bucket), bucket[-1].path
        return self.send("all_reduce", num_bytes, path)


@dataclass(eq=False)
class _Unit:
    """A block, or the model without its blocks (path ""): what is gathered together."""

    path: str
    weights: list[_Weight] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)  # storages of its weights, while they are there
    arriving: tuple[int, int] | None = None  # what was gathered ahead: storage, handle
    sums: list[int] = field(default_factory=list)  # storages of its share of the gradients

    @property
    def num_bytes(self) -> int:
        return sum(weight.num_bytes for weight in self.weights)


class _Sharded(_Rank):
    """FSDP2: `fully_shard` of each block and then of the model."""

    def __init__(
        self, ledger: Ledger, setting: TrainSetting, blocks: Mapping[str, Collection[int]]
    ) -> None:
        super().__init__(ledger, setting)
        self.n = setting.shard_size
        self.group: Group = "shard" if setting.parallelism == "hsdp" else "world"
        self.root = _Unit("")
        self.units = {path: _Unit(path) for path in blocks}
        self.unit_of = cache(self._unit_of)
        unit_of = {storage: self.units[path] for path in blocks for storage in blocks[path]}
        for weight in self.weights.values():
            unit_of.get(weight.storage, self.root).weights.append(weight)
        self.order: list[_Unit] = []  # in which units went forward
        self.previous: int | None = None  # what was gathered for the unit that went forward last
        self.summing: tuple[int, int] | None = None  # whole gradients on their way: storage, handle
        self.copied: list[int] = []  # sums over copies that are on their way
        tags = [event for event in ledger.events if type(event) is Tagged]
        self.states = {tag.storage for tag in tags if tag.category == "optimizer_state"}

    def _unit_of(self, path: str) -> _Unit:
        parts = path.split(".")
        found = (self.units.get(".".join(parts[:count])) for count in range(len(parts), 0, -1))
        return next((unit for unit in found if unit is not None), self.root)

    def run(self) -> Ledger:
        act: Mapping[str, Callable[[Sequence[Any], bool], None]] = {
            "build": self.build, "forward": self.forward, "backward": self.backward,
            "optimizer": self.optimizer, "zero_grad": self.optimizer,
        }  # fmt: skip
        for phase, sums, events in self.phases():
            act[phase](events[:-1], sums)
            if phase == "zero_grad" and self.setting.zero_grad_to_none:
                for unit in (*self.units.values(), self.root):
                    self.free(unit.sums)
                    unit.sums = []
            self.follow(events[-1:])
        outside = self.root.num_bytes // self.item_bytes
        notes = (
            *sharding_notes(self.setting, len(self.units), outside),
            "FSDP2 in closed form: rows that the devices do not share evenly may take more",
        )
        return replace(self.ledger, events=tuple(self.events), notes=(*notes, *self.ledger.notes))

    def share(self, num_bytes: int) -> int:
        """Of a weight; what is as small as a counter is no part of one."""
        return num_bytes if num_bytes <= 8 else -(-num_bytes // self.n)

    def build(self, events: Sequence[Any], _: bool) -> None:
        """Weights are sharded once all are on the device."""
        tags = [place for place, event in enumerate(events) if type(event) is Tagged]
        end = 1 + max(place for place in tags if events[place].storage in self.weights)
        self.follow(events[:end])
        for unit in (*self.units.values(), self.root):
            for weight in unit.weights:
                share = self.share(weight.num_bytes)
                self.allocate(share, "aten.new_zeros", "parameters", unit.path)
            self.free(weight.storage for weight in unit.weights)
        self.optimizer(events[end:], False)

    def optimizer(self, events: Sequence[Any], _: bool) -> None:
        """On the shards only; of what is built, so are copies of the weights."""
        is_building = not self.order
        for event in events:
            if type(event) is Allocated and (not is_building or event.storage in self.states):
                event = event._replace(num_bytes=self.share(event.num_bytes))
            elif type(event) is Computed:
                flops, num_bytes = event.flops // self.n, event.num_bytes // self.n
                event = event._replace(flops=flops, num_bytes=num_bytes)
            self.follow((event,))

    def forward(self, events: Sequence[Any], _: bool) -> None:
        first, last = self.ends(events)
        self.order = sorted(first, key=lambda unit: first[unit])
        self.gather(self.root, True)
        for place, event in enumerate(events):
            unit = self.unit_of(event.path) if _has_path(event) else None
            if unit is not None and first.get(unit) == place and unit is not self.root:
                self.gather(unit, True)
            self.follow((event,))
            if unit is not None and last.get(unit) == place and self.setting.fsdp_reshard:
                self.reshard(unit)
        if self.previous is not None:
            self.free((self.previous,))
            self.previous = None

    def backward(self, events: Sequence[Any], sums: bool) -> None:
        first, last = self.ends(events)
        for place, event in enumerate(events):
            unit = self.unit_of(event.path) if _has_path(event) else None
            if unit is not None and first.get(unit) == place:
                self.gather(unit, False)
                ahead = self.order.index(unit) - 1 if unit in self.order else -1
                if ahead >= 0 and not self.order[ahead].whole:
                    self.ask(self.order[ahead], False)
            self.follow((event,))
            if unit is not None and last.get(unit) == place:
                self.reshard(unit)
                if sums:
                    self.reduce(unit)
        self.reshard(self.root)
        if sums:
            self.reduce(self.root)
        self.settle()
        self.events += map(Awaited, self.copied)
        self.copied.clear()

    def ends(self, events: Sequence[Any]) -> tuple[dict[_Unit, int], dict[_Unit, int]]:
        """Where each block begins and ends."""
        placed = [(self.unit_of(e.path), i) for i, e in enumerate(events) if _has_path(e)]
        last = {unit: place for unit, place in placed if unit is not self.root}
        return dict(reversed([p for p in placed if p[0] in last])), last

    def ask(self, unit: _Unit, follows: bool) -> None:
        """Hands over the gathering of a unit's weights."""
        if unit.arriving is not None or self.n == 1:
            return
        num_bytes = self.n * sum(self.share(weight.num_bytes) for weight in unit.weights)
        storage = self.allocate(num_bytes, "all_gather", "parameters", unit.path, GATHERED)
        handle = self.send("all_gather", num_bytes, unit.path, self.group, follows)
        unit.arriving = storage, handle

    def gather(self, unit: _Unit, is_forward: bool) -> None:
        """What was gathered is copied into the weights. In forward it stays until the next unit's
        is there."""
        if unit.whole:
            return
        self.ask(unit, is_forward and unit is self.root)
        arrived, unit.arriving = unit.arriving, None
        if is_forward and self.previous is not None:
            self.free((self.previous,))
        if arrived is not None:
            self.events.append(Awaited(arrived[1]))
        unit.whole = [
            self.allocate(weight.num_bytes, "resize_", "parameters", unit.path)
            for weight in unit.weights
        ]
        self.copy("fsdp.split_with_sizes_copy", 2 * unit.num_bytes, unit.path)
        if arrived is not None and not is_forward:
            self.free(arrived[:1])
        self.previous = arrived[0] if arrived is not None and is_forward else None

    def reshard(self, unit: _Unit) -> None:
        self.free(unit.whole)
        unit.whole = []

    def reduce(self, unit: _Unit) -> None:
        """A copy of all gradients, their sum over the ranks, and this rank's share of it. The copy
        lives until the next unit makes its own."""
        self.settle()
        gradients = self.live.intersection(g for weight in unit.weights for g in weight.gradients)
        dtype = "float32"
        share = sum(self.share(weight.num_bytes) for weight in unit.weights)
        crossing = share // self.item_bytes * DTYPE_BYTES[dtype]
        whole = self.allocate(self.n * crossing, "fsdp.chunk_cat", "gradients", unit.path)
        self.copy("fsdp.chunk_cat", unit.num_bytes + self.n * crossing, unit.path)
        self.free(gradients)
        summed = self.allocate(crossing, "reduce_scatter", "gradients", unit.path, SUMMED)
        if crossing != share:
            cast = self.allocate(share, "aten._to_copy", "gradients", unit.path, SUMMED)
            self.free((summed,))
            summed = cast
        if unit.sums:
            self.free((summed,))
        else:
            unit.sums = [summed]
        handle = 0
        if self.n > 1:
            handle = self.send(
                "reduce_scatter", self.n * crossing, unit.path, self.group, dtype=dtype
            )
        if self.setting.num_copies > 1:
            self.copied.append(
                self.send("all_reduce", crossing, unit.path, "replicate", dtype=dtype)
            )
        self.summing = whole, handle

    def settle(self) -> None:
        if self.summing is not None:
            whole, handle = self.summing
            self.events += [Awaited(handle)] if handle else []
            self.free((whole,))
            self.summing = None


def _has_path(event: Any) -> bool:
    """Whether it ran in a module."""
    return type(event) in (Allocated, Scratch, Computed)
