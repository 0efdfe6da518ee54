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

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from planner.core.schema import TrainSetting
from planner.core.schema.setting import SHARDED, Collective, Group
from planner.core.units import MIB, format_bytes
from planner.ledger import ledger as on_ledger
from planner.ledger.ledger import Allocated, Awaited, Computed, Event, Freed, Ledger, Sent, Tagged
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


@dataclass(eq=False)
class _Unit:
    """Weights that cross together: a bucket of DDP; a block, or the model without its blocks (path
    ""). A weight is the storage in which one GPU keeps it."""

    path: str = ""
    weights: dict[int, int] = field(default_factory=dict)  # with the bytes of each
    whole: list[int] = field(default_factory=list)  # storages of its weights, while they are there
    arriving: tuple[int, int] | None = None  # what was gathered ahead: storage, handle
    sums: list[int] = field(default_factory=list)  # storages of its share of the gradients

    @property
    def num_bytes(self) -> int:
        return sum(self.weights.values())


class _Rank:
    """One pass over the events of one GPU; what this rank does otherwise is inserted."""

    def __init__(self, ledger: Ledger, setting: TrainSetting) -> None:
        self.ledger, self.setting = ledger, setting
        self.events: list[Event] = []
        self.num_sent = 0
        self.dtype = "bfloat16" if setting.precision == "pure-bf16" else "float32"
        self.item_bytes = DTYPE_BYTES[self.dtype]
        events: Sequence[Any] = ledger.events
        made = {e.storage: e for e in events if type(e) in (Allocated, on_ledger.Scratch)}
        self.num_storages: int = max(made)
        tags = [event for event in events if type(event) is Tagged]
        of_weights = [tag.storage for tag in tags if tag.category == "parameters"]
        self.weights = {storage: made[storage].num_bytes for storage in of_weights}
        of_gradients = [tag for tag in tags if tag.category == "gradients"]
        self.weight_of = {tag.storage: tag.weight for tag in of_gradients}
        self.made_at = {tag.weight: made[tag.storage].path for tag in of_gradients}  # a module
        self.states = {tag.storage for tag in tags if tag.category == "optimizer_state"}
        self.live: set[int] = set()  # storages of gradients that are there

    def phases(self) -> Iterator[tuple[str, bool, Sequence[Any]]]:
        """(phase, whether its gradients are summed over the ranks, its events); its mark follows
        when the next is asked for."""
        parts = min(self.setting.accumulate, on_ledger.RECORDED_MICRO_BATCHES)
        begun = micro_batch = 0
        for place, event in enumerate(self.ledger.events):
            if type(event) is on_ledger.Marked:
                is_backward = event.phase == "backward"
                micro_batch += is_backward
                sums = micro_batch % parts == 0 or self.setting.gradient_sync == "every"
                yield event.phase, is_backward and sums, self.ledger.events[begun:place]
                self.events.append(event)
                begun = place + 1

    def allocate(
        self, num_bytes: int, label: str, category: on_ledger.Category, path: str = "",
        stream: str = "",
    ) -> int:  # fmt: skip
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

    def free(self, storages: Collection[int]) -> None:
        self.live.difference_update(storages)
        self.events += map(Freed, storages)

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
        buckets = self.buckets()
        total = sum(bucket.num_bytes for bucket in buckets)
        for phase, sums, events in self.phases():
            if sums:
                self.backward(events, buckets)
            else:
                self.follow(events)
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

    def buckets(self) -> list[_Unit]:
        """`compute_bucket_assignment_by_size`: one closes when it has reached its limit. Weights
        come in the order in which the first step has their gradients."""
        found = [_Unit()]
        for weight in dict.fromkeys(self.weight_of.values()):
            if found[-1].num_bytes >= (FIRST_BUCKET_BYTES if len(found) == 1 else BUCKET_BYTES):
                found.append(_Unit())
            found[-1].weights[weight] = self.weights[weight]
            found[-1].path = self.made_at[weight]
        return found

    def backward(self, events: Sequence[Any], buckets: Sequence[_Unit]) -> None:
        """Each bucket is sent once the last of its gradients is there, and all are awaited."""
        last = {event.path: place for place, event in enumerate(events) if _has_path(event)}
        due: dict[int, list[_Unit]] = {}
        for bucket in buckets:
            place = max(last.get(self.made_at[weight], 0) for weight in bucket.weights)
            due.setdefault(place, []).append(bucket)
        sent = []
        for place, event in enumerate(events):
            self.follow((event,))
            for bucket in due.get(place, ()):
                for weight, num_bytes in bucket.weights.items():  # divided on its way
                    self.copy("aten.mul", 2 * num_bytes, self.made_at[weight])
                sent.append((self.send("all_reduce", bucket.num_bytes, bucket.path), bucket))
        for handle, bucket in sent:
            self.events.append(Awaited(handle))
            for num_bytes in bucket.weights.values():
                self.copy("aten.copy_", 2 * num_bytes)


class _Sharded(_Rank):
    """FSDP2: `fully_shard` of each block and then of the model."""

    def __init__(
        self, ledger: Ledger, setting: TrainSetting, blocks: Mapping[str, Collection[int]]
    ) -> None:
        super().__init__(ledger, setting)
        self.n = setting.shard_size
        self.group: Group = "shard" if setting.parallelism == "hsdp" else "world"
        self.blocks = {path: _Unit(path) for path in blocks}
        self.root = _Unit()
        self.units = (*self.blocks.values(), self.root)
        self.unit_of = cache(self._unit_of)
        owners = {storage: self.blocks[path] for path in blocks for storage in blocks[path]}
        for weight, num_bytes in self.weights.items():
            owners.get(weight, self.root).weights[weight] = num_bytes
        self.order: list[_Unit] = []  # in which units went forward
        self.previous: list[int] = []  # what was gathered for the unit that went forward last
        self.summing: tuple[int, int] | None = None  # whole gradients on their way: storage, handle
        self.copied: list[int] = []  # sums over copies that are on their way

    def _unit_of(self, path: str) -> _Unit:
        parts = path.split(".")
        found = (self.blocks.get(".".join(parts[:count])) for count in range(len(parts), 0, -1))
        return next((unit for unit in found if unit is not None), self.root)

    def run(self) -> Ledger:
        for phase, sums, events in self.phases():
            if phase == "build":
                self.build(events)
            elif phase in ("forward", "backward"):
                self.walk(events, phase == "forward", sums)
            else:
                self.update(events)
            if phase == "zero_grad" and self.setting.zero_grad_to_none:
                for unit in self.units:
                    self.free(unit.sums)
                    unit.sums = []
        outside = self.root.num_bytes // self.item_bytes
        notes = (
            *sharding_notes(self.setting, len(self.blocks), outside),
            "FSDP2 in closed form: rows that the devices do not share evenly may take more",
        )
        return replace(self.ledger, events=tuple(self.events), notes=(*notes, *self.ledger.notes))

    def share(self, num_bytes: int) -> int:
        """Of a weight; what is as small as a counter is no part of one."""
        return num_bytes if num_bytes <= 8 else -(-num_bytes // self.n)

    def share_of(self, unit: _Unit) -> int:
        return sum(map(self.share, unit.weights.values()))

    def build(self, events: Sequence[Any]) -> None:
        """Weights are sharded once all are on the device."""
        end = 1 + max(n for n, e in enumerate(events) if type(e) is Tagged and e[0] in self.weights)
        self.follow(events[:end])
        for unit in self.units:
            for num_bytes in unit.weights.values():
                self.allocate(self.share(num_bytes), "aten.new_zeros", "parameters", unit.path)
            self.free(unit.weights)
        self.update(events[end:])

    def update(self, events: Sequence[Any]) -> None:
        """On the shards only; of what is built, so are copies of the weights."""
        is_building = not self.order
        for event in events:
            if type(event) is Allocated and (not is_building or event.storage in self.states):
                event = event._replace(num_bytes=self.share(event.num_bytes))
            elif type(event) is Computed:
                flops, num_bytes = event.flops // self.n, event.num_bytes // self.n
                event = event._replace(flops=flops, num_bytes=num_bytes)
            self.follow((event,))

    def walk(self, events: Sequence[Any], is_forward: bool, sums: bool) -> None:
        """Through the units: weights are gathered as one begins, and as backward begins those of
        the one that ran before it in forward."""
        places = [(self.unit_of(e.path), place) for place, e in enumerate(events) if _has_path(e)]
        places = [(unit, place) for unit, place in places if unit is not self.root]
        begins = {place: unit for unit, place in dict(reversed(places)).items()}
        ends = {place: unit for unit, place in dict(places).items()}
        if is_forward:
            self.order = [begins[place] for place in sorted(begins)]
            self.gather(self.root, True)
        for place, event in enumerate(events):
            if (unit := begins.get(place)) is not None:
                self.gather(unit, is_forward)
                before = [] if is_forward else self.order[: self.order.index(unit)][-1:]
                for one in before:
                    if not one.whole:
                        self.ask(one, False)
            self.follow((event,))
            if (unit := ends.get(place)) is not None:
                self.leave(unit, is_forward, sums)
        if is_forward:
            self.free(self.previous)
            self.previous = []
        else:
            self.leave(self.root, False, sums)
            self.settle()
            self.events += map(Awaited, self.copied)
            self.copied.clear()

    def ask(self, unit: _Unit, follows: bool) -> None:
        """Hands over the gathering of a unit's weights."""
        if unit.arriving is not None or self.n == 1:
            return
        num_bytes = self.n * self.share_of(unit)
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
        if is_forward:
            self.free(self.previous)
        self.previous = [arrived[0]] if arrived is not None and is_forward else []
        if arrived is not None:
            self.events.append(Awaited(arrived[1]))
        unit.whole = [
            self.allocate(num_bytes, "resize_", "parameters", unit.path)
            for num_bytes in unit.weights.values()
        ]
        self.copy("fsdp.split_with_sizes_copy", 2 * unit.num_bytes, unit.path)
        if arrived is not None and not is_forward:
            self.free(arrived[:1])

    def leave(self, unit: _Unit, is_forward: bool, sums: bool) -> None:
        """A unit has run: its weights are there no more, and its gradients are summed."""
        if not is_forward or self.setting.fsdp_reshard:
            self.free(unit.whole)
            unit.whole = []
        if sums:
            self.reduce(unit)

    def reduce(self, unit: _Unit) -> None:
        """A copy of all gradients in fp32, their sum over the ranks, and this rank's share of it.
        The copy lives until the next unit makes its own."""
        self.settle()
        share = self.share_of(unit)
        crossing = share // self.item_bytes * DTYPE_BYTES["float32"]
        whole = self.allocate(self.n * crossing, "fsdp.chunk_cat", "gradients", unit.path)
        self.copy("fsdp.chunk_cat", unit.num_bytes + self.n * crossing, unit.path)
        own = (gradient for gradient, weight in self.weight_of.items() if weight in unit.weights)
        self.free(sorted(self.live.intersection(own)))
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
        what: dict[str, Any] = {"path": unit.path, "dtype": "float32"}
        if self.n > 1:
            handle = self.send("reduce_scatter", self.n * crossing, group=self.group, **what)
        if self.setting.num_copies > 1:
            self.copied.append(self.send("all_reduce", crossing, group="replicate", **what))
        self.summing = whole, handle

    def settle(self) -> None:
        if self.summing is not None:
            whole, handle = self.summing
            self.events += [Awaited(handle)] if handle else []
            self.free((whole,))
            self.summing = None


def _has_path(event: Any) -> bool:
    """Whether it ran in a module."""
    return type(event) in (Allocated, on_ledger.Scratch, Computed)
