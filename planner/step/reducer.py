"""What `DistributedDataParallel` does with gradients: buckets, copies and collectives, in order.

The rules of torch 2.13 (torch/nn/parallel/distributed.py, torch/csrc/distributed/c10d/reducer.cpp
and comm.cpp); tests/step/test_data_parallel.py lays them beside torch's own reducer. They
know sizes only: tensors are the affair of `Gradients`, which the step on shapes and a real one each
have. Bytes do not depend on how many devices there are: a single GPU holds them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from planner.core.collectives import Collective
from planner.core.errors import UnsupportedError
from planner.core.schema import TrainSetting
from planner.core.units import MIB
from planner.step.tensor import DTYPE_BYTES

# `_DEFAULT_FIRST_BUCKET_BYTES` and `bucket_cap_mb`; a cap that is given holds for the first too.
DEFAULT_LIMITS = (MIB, 25 * MIB)
COMPRESSED = {"fp16": "float16", "bf16": "bfloat16"}
BUCKET_LABEL = "DDP bucket"
COMPRESSED_LABEL = "DDP compressed bucket"
USED_LABEL = "DDP local_used_map"
BROADCAST_LABEL = "DDP broadcast"


class Weight(NamedTuple):
    """A tensor that crosses between devices: a parameter, its gradient, a buffer."""

    numel: int
    dtype: str
    num_bytes: int
    name: str = ""


class Gradients(Protocol):
    """The gradients of a model's weights, which are called by their place in registration order;
    and the device that they are on."""

    def make(self, numel: int, dtype: str, label: str) -> Any:
        """A flat tensor, which lives as long as it is held."""

    def keep(self, flat: Any) -> None:
        """From now on these bytes count as gradients."""

    def compute(self, name: str, dtype: str, num_bytes: int) -> None:
        """A kernel that moves `num_bytes`."""

    def is_there(self, index: int) -> bool:
        """Whether the weight has a gradient."""

    def is_in(self, index: int, flat: Any) -> bool:
        """Whether that gradient is a view of `flat`."""

    def put_in(self, index: int, flat: Any, offset: int) -> None:
        """Makes it the view of `flat` that begins at element `offset`."""

    def send(self, collective: Collective, num_bytes: int, dtype: str, *, follows: bool) -> int:
        """Hands a collective of all devices over; the handle by which it is awaited."""

    def wait(self, handle: int) -> None: ...


@dataclass
class Bucket:
    """Weights whose gradients cross together; `pending` of them are not ready yet."""

    places: dict[int, int]  # weight -> the element of `flat` that its gradient begins at
    numel: int
    num_bytes: int
    dtype: str
    flat: Any
    pending: int = 0
    handle: int = 0
    compressed: Any = None


def steps_until_steady(setting: TrainSetting) -> int:
    """How many optimizer steps there are until one repeats the one before: where buckets are
    rebuilt, the one after still holds the first: the second, of a static graph the third."""
    if setting.parallelism != "ddp" or _is_dynamic(setting):
        return 2
    return 3 + setting.ddp_static_graph


def _is_dynamic(setting: TrainSetting) -> bool:
    """Whether each step may leave out other weights."""
    return setting.ddp_find_unused and not setting.ddp_static_graph


def assign_buckets(weights: Iterable[Weight], limits: Sequence[int]) -> list[list[int]]:
    """Which of `weights` share a bucket, by place (`compute_bucket_assignment_by_size`): one closes
    when it has reached its limit, which it may overshoot. The last limit holds for all further
    buckets. Each dtype fills buckets of its own; what is left open comes last."""
    closed: list[list[int]] = []
    filling: dict[str, list[int]] = {}
    filled: dict[str, int] = {}
    num_closed: dict[str, int] = {}
    for place, weight in enumerate(weights):
        key = weight.dtype
        filling.setdefault(key, []).append(place)
        filled[key] = filled.get(key, 0) + weight.num_bytes
        if filled[key] >= limits[min(num_closed.get(key, 0), len(limits) - 1)]:
            closed.append(filling.pop(key))
            num_closed[key] = num_closed.get(key, 0) + 1
            del filled[key]
    return [*closed, *filling.values()]


def first_buckets(weights: Sequence[Weight], setting: TrainSetting) -> list[list[int]]:
    """Those that it is made with, in the order in which they are reduced: all weights at once, or
    where some may go unused by registration, the last first (`_ddp_init_helper`)."""
    keeps = _is_dynamic(setting)
    limits = bucket_limits(setting) if keeps else (sum(w.num_bytes for w in weights) + 1,)
    return sorted(assign_buckets(weights, limits), key=min)[::-1]


def bucket_limits(setting: TrainSetting) -> tuple[int, ...]:
    """Bytes at which the first, and each further bucket closes."""
    cap = setting.ddp_bucket_mb
    return DEFAULT_LIMITS if cap is None else (cap * MIB,)


class Reducer:
    """The buckets of one model, kept from when it is wrapped; they are rebuilt once, in the order
    in which gradients became ready. `syncs` is false within `no_sync`."""

    def __init__(
        self, gradients: Gradients, weights: Sequence[Weight], setting: TrainSetting
    ) -> None:
        self.gradients = gradients
        self.weights = weights
        self.setting = setting
        self.is_dynamic = _is_dynamic(setting)
        self.syncs = True
        self.num_iterations = 0
        self.order: list[int] = []  # of readiness, until the buckets are rebuilt
        self.is_rebuilt = False
        self.is_expecting = False  # from the end of a synchronised forward to that of its backward
        self.is_begun = False  # a gradient was taken, and not all are summed
        self.unused: Sequence[int] = ()  # weights without a gradient
        self.unmarked: Sequence[int] = ()  # of these, those whose place is not yet zeroed
        self.marked: set[int] = set()
        self.num_sent = 0
        self.used_map: Any = None
        self.used_handle = 0
        self.stash: list[Any] = []  # what was sent and NCCL holds
        self.handed_over: list[Any] = []  # of that, what the next collective lets go
        self.buckets: list[Bucket] = []
        self._make_buckets(first_buckets(weights, setting))
        if setting.ddp_find_unused or setting.ddp_static_graph:
            self.used_map = gradients.make(len(weights), "int32", USED_LABEL)
            gradients.keep(self.used_map)

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)

    @property
    def passes_through_sink(self) -> bool:
        """Whether the output of this forward is copied (`_DDPSink`): by then `begin` was called."""
        is_first = self.setting.ddp_static_graph and self.num_iterations == 1
        return self.is_dynamic or is_first

    def begin(self) -> None:
        """`prepare_for_forward`, `_rebuild_buckets`."""
        self.rebuild()
        if self.syncs:
            self.num_iterations += 1

    def expect(self, unused: Sequence[int] = ()) -> None:
        """`prepare_for_backward`, after a forward; `unused` weights do not enter its output.

        What was sent before counts as seen by NCCL's watchdog from here on: see `_send`."""
        self.handed_over += self.stash
        self.stash.clear()
        if not self.syncs:
            return
        self.is_expecting = True
        self.marked.clear()
        self.num_sent = 0
        for bucket in self.buckets:
            bucket.pending = len(bucket.places)
        if self.is_dynamic:
            self.unused = unused
        self.unmarked = self.unused

    def ready(self, index: int) -> None:
        """`autograd_hook`: a weight's gradient was accumulated."""
        if not self.is_expecting:
            return
        self.is_begun = True
        if len(self.order) < len(self.weights) and not (self.is_rebuilt or self.is_dynamic):
            self.order.append(index)
        if self._delays:
            return
        unmarked, self.unmarked = self.unmarked, ()
        for other in (*unmarked, index):
            self._mark(other)

    @property
    def _delays(self) -> bool:
        """In the first iteration of a static graph nothing is reduced before backward has ended."""
        return self.setting.ddp_static_graph and self.num_iterations == 1

    def finish(self) -> None:
        """The end of backward: `finalize_backward`, or `delay_all_reduce` before it."""
        if not self.is_begun:
            return
        if self._delays:
            seen = set(self.order)
            self.unused = [i for i in range(len(self.weights)) if i not in seen]
            self.order += self.unused
            self._send_used_map()
            for index in range(len(self.weights)):
                self._copy_in(index)
            for bucket in self.buckets:
                self._send(bucket)
        elif self.num_sent < len(self.buckets):
            return  # the next forward will say why
        for bucket in self.buckets:
            self._receive(bucket)
        if self.used_handle:
            self.gradients.wait(self.used_handle)
            self.used_handle = 0
        self.is_expecting = self.is_begun = False

    def rebuild(self) -> None:
        """`_rebuild_buckets`, of a static graph after its second iteration. torch lets go of the
        old ones first, but NCCL holds what it sent, and those that gradients are views of stay
        until their gradients are copied. Raises UnsupportedError where backward has left out a
        weight, as torch does here."""
        if self.is_begun:
            raise self._unfinished()
        num_needed = 2 if self.setting.ddp_static_graph else 1
        if self.is_rebuilt or not self.order or self.num_iterations < num_needed:
            return
        order, self.order = self.order, []
        found = assign_buckets([self.weights[i] for i in order], bucket_limits(self.setting))
        self._agree_on_indices(len(order), len(found))
        self.buckets.clear()
        self._make_buckets([[order[place] for place in places] for places in found])
        self.is_rebuilt = True

    def _agree_on_indices(self, num_weights: int, num_buckets: int) -> None:
        """`sync_bucket_indices`: two small tensors that the first device sends to the others."""
        held = []
        for numel in (num_weights + 1, num_buckets):
            held.append(self.gradients.make(numel, "int32", BROADCAST_LABEL))
            self.gradients.wait(self.gradients.send("broadcast", numel * 4, "int32", follows=True))

    def _make_buckets(self, assigned: Iterable[Sequence[int]]) -> None:
        """`initialize_buckets`."""
        self.where: dict[int, Bucket] = {}
        for indices in assigned:
            places, numel, dtype = {}, 0, self.weights[indices[0]].dtype
            for index in indices:
                places[index] = numel
                numel += self.weights[index].numel
            num_bytes = sum(self.weights[index].num_bytes for index in indices)
            flat = self.gradients.make(numel, dtype, BUCKET_LABEL)
            self.gradients.keep(flat)
            bucket = Bucket(places, numel, num_bytes, dtype, flat)
            self.buckets.append(bucket)
            for index, offset in places.items():
                self.where[index] = bucket
                if self.setting.ddp_bucket_view and self.gradients.is_there(index):
                    self._compute("aten.copy_", index)
                    self.gradients.put_in(index, flat, offset)

    def _mark(self, index: int) -> None:
        """`mark_variable_ready`: buckets are handed over in their order, each when it is full.
        Raises UnsupportedError where a weight comes twice, as torch does."""
        if index in self.marked:
            raise UnsupportedError(
                f"the gradient of {self._name(index)} comes after DistributedDataParallel took it "
                "for unused, and torch fails there: it is used within reentrant checkpointing.",
                "Set ddp_find_unused=false or ddp_static_graph=true, or checkpoint with "
                "use_reentrant=False.",
            )
        self.marked.add(index)
        self._copy_in(index)
        self.where[index].pending -= 1
        while self.num_sent < len(self.buckets) and not self.buckets[self.num_sent].pending:
            self._send(self.buckets[self.num_sent])
            self.num_sent += 1
        if self.num_sent == len(self.buckets) and self.is_dynamic:
            self._send_used_map()

    def _copy_in(self, index: int) -> None:
        """`mark_variable_ready_dense`: divided by the number of devices on the way, unless a hook
        does that; a gradient that is in its bucket already is divided there."""
        bucket, gradients = self.where[index], self.gradients
        has_hook = self.setting.ddp_compression != "none"
        if not gradients.is_there(index):
            self._compute("aten.zero_", index, 1)
        elif gradients.is_in(index, bucket.flat):
            if not has_hook:
                self._compute("aten.div_", index)
        else:
            self._compute("aten.copy_" if has_hook else "aten.mul", index)
            if self.setting.ddp_bucket_view:
                gradients.put_in(index, bucket.flat, bucket.places[index])

    def _send(self, bucket: Bucket) -> None:
        """`all_reduce_bucket`, with `_compress_hook` where there is one. A bucket that has the
        hook's dtype is its own copy.

        torch waits for the future of a collective, not for its `Work`, so NCCL holds the tensor
        until its watchdog, which looks every 100 ms, has seen that it was summed, and then until
        another collective is handed over (ProcessGroupNCCL.cpp of torch 2.13, `workEnqueue`,
        `shelvesToUnstash_`, `kWatchdogThreadSleepMillis`). Taken here is the first of the next
        backward: an optimizer's step is shorter than that, and few forwards are much longer."""
        gradients, num_bytes = self.gradients, bucket.num_bytes
        dtype = COMPRESSED.get(self.setting.ddp_compression, bucket.dtype)
        if dtype != bucket.dtype:
            num_bytes = bucket.numel * DTYPE_BYTES[dtype]
            bucket.compressed = gradients.make(bucket.numel, dtype, COMPRESSED_LABEL)
            gradients.compute("aten._to_copy", dtype, bucket.num_bytes + num_bytes)
        if self.setting.ddp_compression != "none":
            gradients.compute("aten.div_", dtype, 2 * num_bytes)
        bucket.handle = gradients.send("all_reduce", num_bytes, dtype, follows=True)
        self.handed_over.clear()
        self.stash.append(bucket.flat if bucket.compressed is None else bucket.compressed)

    def _receive(self, bucket: Bucket) -> None:
        """`finalize_backward` of a bucket; a compressed copy stays where `_send` put it."""
        gradients = self.gradients
        gradients.wait(bucket.handle)
        if bucket.compressed is not None:
            num_bytes = bucket.numel * DTYPE_BYTES[COMPRESSED[self.setting.ddp_compression]]
            gradients.compute("aten.copy_", bucket.dtype, bucket.num_bytes + num_bytes)
            bucket.compressed = None
        if not self.setting.ddp_bucket_view:
            for index in bucket.places:
                if gradients.is_there(index):
                    self._compute("aten.copy_", index)

    def _send_used_map(self) -> None:
        num_bytes = len(self.weights) * DTYPE_BYTES["int32"]
        self.used_handle = self.gradients.send("all_reduce", num_bytes, "int32", follows=True)

    def _compute(self, name: str, index: int, num_tensors: int = 2) -> None:
        weight = self.weights[index]
        self.gradients.compute(name, weight.dtype, num_tensors * weight.num_bytes)

    def _name(self, index: int) -> str:
        return self.weights[index].name or f"parameter {index}"

    def _unfinished(self) -> UnsupportedError:
        left = [self._name(i) for i in range(len(self.weights)) if i not in self.marked]
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        get = "gets" if len(left) == 1 else "get"
        return UnsupportedError(
            f"{', '.join(left[:3])}{more} {get} no gradient, and DistributedDataParallel stops in "
            "the second forward.",
            "Set ddp_find_unused=true, or freeze these parameters (requires_grad=False).",
        )
