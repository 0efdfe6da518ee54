"""The ledger: what one training step allocates, frees, computes and moves, in order.

First the events, then `Ledger`, then the same step at any batch size (`AffineLedger`: the events
stay, and their sizes are affine in the batch), then the kinds of torch's operations.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, get_args

from planner.core.schema.record import Phase
from planner.core.schema.setting import Collective, Group

Category = Literal[
    "parameters", "buffers", "gradients", "optimizer_state", "activations", "temporaries",
    "workspace",
]  # fmt: skip
CATEGORIES: tuple[Category, ...] = (
    "parameters", "buffers", "gradients", "optimizer_state", "activations", "temporaries",
)  # fmt: skip
# The path of the events of an update that runs within backward, as soon as the gradient of its
# weight is there. The first of them is the call itself, which costs the host and no device.
IN_BACKWARD = "optimizer in backward"
OPTIMIZER_CALL = "Optimizer.step"
# A call of code that was compiled for one weight's update: it costs the host and no device.
COMPILED_CALL = "compiled update"
# The most micro-batches of a step that a ledger holds: a third one repeats the second, or, where
# the second is the last and sends what the others do not, the first.
LEDGER_MICRO_BATCHES = 2
WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"  # cuBLAS's size; deterministic training sets it
OperationKind = Literal[
    "matmul", "conv", "grouped conv", "attention", "pointwise", "reduction", "copy", "transfer"
]
# The names of transfers between the device and the host's pinned memory.
TO_HOST, TO_DEVICE = "copy to the host", "copy to the device"
# The transfers of an optimizer on the host. Gradients leave beside the compute stream: they have no
# kernel there.
GRADIENT_TO_HOST, WEIGHT_TO_DEVICE = "gradient to the host", "weight to the device"


class Allocated(NamedTuple):
    """A storage of `num_bytes` is allocated. `label` names the operation that requested it and
    `path` the module it ran in. `stream` is the CUDA stream whose pool of the caching allocator it
    comes from and returns to: "" is the one that computes."""

    storage: int
    num_bytes: int
    label: str
    path: str = ""
    stream: str = ""


class Scratch(NamedTuple):
    """A kernel allocates a storage beside its results: `Freed` follows before it returns. The bytes
    depend on the device: they follow, by the law of that name in `planner.memory.scratch`, from
    `sizes` (rows, columns …), which are affine in the batch. They may be 0."""

    storage: int
    law: str
    sizes: tuple[int, ...]
    label: str
    path: str = ""

    @property
    def num_bytes(self) -> int:
        """0: no device is named."""
        return 0

    @property
    def stream(self) -> str:
        return ""


class Freed(NamedTuple):
    """A storage is freed: its last reference is gone."""

    storage: int


class CacheFreed(NamedTuple):
    """The caching allocator returns its wholly free segments to the driver, as it does once cuDNN
    has tried its algorithms for a convolution."""

    path: str = ""


class Tagged(NamedTuple):
    """From here on a storage counts as `category` (saved for backward, kept as a gradient …).

    `weight` is the storage of a gradient's weight; 0 for all other categories.
    """

    storage: int
    category: Category
    weight: int = 0


class PhaseEnded(NamedTuple):
    """A phase ends. `step` counts optimizer steps from 0; the steady step is 1 or later."""

    phase: Phase
    step: int


class Computed(NamedTuple):
    """An operation runs: `kernels` launches, which do `flops` FLOPs (a multiply-add is two) and
    move `num_bytes` bytes to and from device memory (a transfer: over the host's link), in `dtype`.
    `path` is the module it runs in."""

    name: str
    kind: OperationKind
    dtype: str
    flops: int
    num_bytes: int
    kernels: int
    path: str


Operation = tuple[Phase, Computed]


class Sent(NamedTuple):
    """The host issues a collective. `num_bytes` are those of the whole array (as nccl-tests counts:
    an all-gather's output, a reduce-scatter's input), in `dtype`. The devices of `group` run their
    collectives one after the other, beside computations. One that `follows` the computations before
    it waits for them, as a sum of gradients does; weights are gathered as soon as the host issues
    it. `Awaited` names it by its `handle`."""

    handle: int
    collective: Collective
    num_bytes: int
    dtype: str
    group: Group
    follows: bool
    path: str = ""


class Awaited(NamedTuple):
    """All computations from here on wait until collective `handle` is done."""

    handle: int


class Exchange(NamedTuple):
    """A collective that a step issues or awaits, in `phase` of its micro-batch `micro_batch` (from
    0), after `place` of the step's operations."""

    phase: Phase
    micro_batch: int
    place: int
    event: Sent | Awaited


_new_computed = partial(tuple.__new__, Computed)  # Computed(...) takes three times as long
_FLOPS, _BYTES, _PATH = map(Computed._fields.index, ("flops", "num_bytes", "path"))
Event = Allocated | Scratch | Freed | CacheFreed | Tagged | PhaseEnded | Computed | Sent | Awaited
EVENT_KINDS: tuple[type[Event], ...] = get_args(Event)


@dataclass(eq=False)
class BatchEvents(Sequence[Event]):
    """The events of an affine ledger at one batch size. With `scratch_bytes` they are those of a
    device, and scratch has its bytes. The events are only made when one of them is read: an
    estimate reads just their sizes and work."""

    affine: AffineLedger
    batch_size: int
    scratch_bytes: Callable[[str, tuple[int, ...]], int] | None = None

    @cached_property
    def sizes(self) -> list[int]:
        """The bytes of each request, in order."""
        _, fixed, slopes = self.affine.requests
        batch_size = self.batch_size
        sizes = [n + batch_size * slope for n, slope in zip(fixed, slopes, strict=True)]
        if self.scratch_bytes is not None:
            for law, law_sizes, numbers in self._scratch:
                num_bytes = self.scratch_bytes(law, law_sizes)
                for number in numbers:
                    sizes[number] = num_bytes
        return sizes

    @cached_property
    def work(self) -> list[Computed]:
        """The different operations, in the order of `AffineLedger.work`."""
        _, fixed_columns, byte_slopes, flop_slopes = self.affine.work
        columns = list(fixed_columns)
        for column, slopes in (_FLOPS, flop_slopes), (_BYTES, byte_slopes):
            pairs = zip(fixed_columns[column], slopes, strict=True)
            columns[column] = [n + self.batch_size * slope for n, slope in pairs]
        return list(map(_new_computed, zip(*columns, strict=True)))

    @cached_property
    def _events(self) -> tuple[Any, ...]:
        events: list[Any] = list(self.affine.template.events)
        indices, is_sized = self.affine.requests[0], self.scratch_bytes is not None
        for index, number in self.affine.work[0].items():
            events[index] = self.work[number]
        for index, num_bytes in zip(indices, self.sizes, strict=True):
            if type(events[index]) is Allocated:
                events[index] = events[index]._replace(num_bytes=num_bytes)
            elif is_sized:
                events[index] = Allocated(events[index][0], num_bytes, *events[index][3:])
        for _, sizes, numbers in () if is_sized else self._scratch:
            for index in (indices[number] for number in numbers):
                events[index] = events[index]._replace(sizes=sizes)
        return tuple(events)

    @cached_property
    def _scratch(self) -> list[tuple[str, tuple[int, ...], list[int]]]:
        """By law: (law, its sizes at this batch, the numbers of the requests for that scratch)."""
        rows, growth = [], self.batch_size - self.affine.template.batch_size
        for (law, law_sizes, slopes), numbers in self.affine.scratch.items():
            sizes = tuple([n + growth * slope for n, slope in zip(law_sizes, slopes, strict=True)])
            rows.append((law, sizes, numbers))
        return rows

    def __len__(self) -> int:
        return len(self.affine.template.events)

    def __getitem__(self, index: Any) -> Any:
        return self._events[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, BatchEvents) and other.affine.template is self.affine.template:
            first, second = [(e.batch_size, not e.scratch_bytes, e.sizes) for e in (self, other)]
            return first == second
        return isinstance(other, BatchEvents | tuple) and self._events == tuple(other)


@dataclass(frozen=True)
class Ledger:
    """All events of building a model and running its first optimizer steps at one batch size.

    The last step is the steady one. It is the second, since the optimizer's state exists from the
    end of the first on; where DDP rebuilds its buckets, it is the third.
    """

    events: tuple[Event, ...] | BatchEvents
    batch_size: int
    num_parameters: int
    notes: tuple[str, ...] = field(default=())
    # What forward saves in a memory pool that is never given back, so that live bytes do not grow.
    pooled_saved_bytes: int = 0
    # The requests and releases of that pool, as `planner.memory.replay` takes them.
    pool_requests: tuple[int, ...] = field(default=(), repr=False)
    # The part of the peak's live bytes that need not be there: it depends on when the device gets
    # to a layer, and the events are those of the worst case.
    doubtful_bytes: int = 0
    # The most bytes that are freed and yet unusable before another stream is done with them.
    late_bytes: int = 0
    # The task's word for an item of its batch ("": unknown), and the class of the optimizer that
    # the task makes ("": none).
    unit: str = ""
    own_optimizer: str = ""
    # Whether torch's own CUDA code made the events: cuBLAS's workspaces are among them.
    is_recorded: bool = False

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment of this process. A recorded ledger needs no further workspace of cuBLAS:
        it has them among its events."""
        return {**os.environ, **({WORKSPACE_VARIABLE: ":0:0"} if self.is_recorded else {})}

    @property
    def template(self) -> Ledger:
        """The ledger that has these events but for their sizes: what does not depend on sizes is
        read off it, once for all batches. It may be this one."""
        return self.events.affine.template if isinstance(self.events, BatchEvents) else self

    def __hash__(self) -> int:
        """A hash that does not read every event: caches have ledgers as keys."""
        return hash((len(self.events), self.batch_size, self.num_parameters, self.notes))

    @cached_property
    def indices(self) -> dict[type, list[int]]:
        """The indices of the events, by type. Allocated and Scratch share one list."""
        indices: dict[type, list[int]] = {kind: [] for kind in EVENT_KINDS}
        indices[Scratch] = indices[Allocated]
        for index, kind in enumerate(map(type, self.events)):
            indices[kind].append(index)
        return indices

    def operations(self, step: int = 1) -> Iterator[Operation]:
        """(phase, operation) of optimizer step `step`, in order. The phase is forward, backward,
        optimizer or zero_grad; an update within backward counts as optimizer."""
        operations = self._operations.get(step, ())
        if isinstance(self.events, BatchEvents):
            numbers, work = self.events.affine.work[0], self.events.work
            return ((phase, work[numbers[index]]) for phase, index, _ in operations)
        return ((phase, operation) for phase, _, operation in operations)

    def exchanges(self, step: int = 1) -> tuple[Exchange, ...]:
        """The collectives that optimizer step `step` issues and awaits, in order."""
        return tuple(self.template._exchanges.get(step, ()))

    @cached_property
    def _exchanges(self) -> dict[int, list[Exchange]]:
        """The exchanges by optimizer step."""
        exchanges: dict[int, list[Exchange]] = {}
        counts: dict[int, list[int]] = {}  # by step: its operations and micro-batches so far
        pending: list[tuple[int, Sent | Awaited]] = []  # of the phase that ends next
        num_operations = 0
        for event in self.events:
            if type(event) is Computed:
                num_operations += 1
            elif type(event) is Sent or type(event) is Awaited:
                pending.append((num_operations, event))
            elif type(event) is PhaseEnded:
                count = counts.setdefault(event.step, [0, 0])
                exchanges.setdefault(event.step, []).extend(
                    Exchange(event.phase, count[1], count[0] + place, exchange)
                    for place, exchange in pending
                )
                count[0] += num_operations
                count[1] += event.phase == "backward"
                pending, num_operations = [], 0
        return exchanges

    @cached_property
    def operation_names(self) -> frozenset[str]:
        """The names of all operations."""
        if self.template is not self:
            return self.template.operation_names
        return frozenset([event.name for event in self.events if type(event) is Computed])

    @cached_property
    def _operations(self) -> dict[int, list[tuple[Phase, int, Computed]]]:
        """(phase, index, operation), by optimizer step."""
        if self.template is not self:
            return self.template._operations
        by_step: dict[int, list[tuple[Phase, int, Computed]]] = {}
        pending: list[tuple[int, Computed]] = []  # of the phase that ends next
        for index, event in enumerate(self.events):
            if type(event) is Computed:
                pending.append((index, event))
            elif type(event) is PhaseEnded:
                by_step.setdefault(event.step, []).extend(
                    ("optimizer" if operation.path == IN_BACKWARD else event.phase, at, operation)
                    for at, operation in pending
                )
                pending = []
        return by_step


# A step on shapes at any batch size.
#
# A run at a huge batch gives every size as fixed + batch * per image. A batch of 1 is another step
# (dimensions of size 1 change which copies happen), so it runs by itself.

# A batch beyond all sizes that do not grow with it: from a size there, fixed + HUGE * per image,
# both parts can be read off like digits.
_HUGE_BITS = 40
HUGE = 1 << _HUGE_BITS
_HALF = HUGE // 2


@dataclass(frozen=True)
class AffineLedger:
    """A ledger at any batch size from 2 on, whose sizes are affine in the batch.

    The `template` is the ledger at batch HUGE, where each size shows its fixed part and its part
    per image (the slope). Any other ledger may be a template too: all of its sizes count as fixed,
    and it answers for no batch but its own.
    """

    template: Ledger

    @classmethod
    def from_huge(cls, ledger: Ledger) -> AffineLedger:
        """The affine ledger of one run at batch HUGE. Its step must be known to be affine, and run
        at any batch: a step on shapes."""
        assert ledger.batch_size == HUGE
        return cls(ledger)

    def ledger(self, batch_size: int) -> Ledger:
        """The ledger at another batch of 2 or more."""
        assert batch_size > 1, "a batch of 1 is another step"
        if batch_size == self.template.batch_size:
            return self.template
        assert self.template.batch_size == HUGE, "sizes at other batches are not known"
        return replace(self.template, events=BatchEvents(self, batch_size), batch_size=batch_size)

    @cached_property
    def requests(self) -> tuple[list[int], list[int], list[int]]:
        """Three columns of the requests, in order: the event's index, the fixed bytes, and the
        bytes per image. Both are 0 for scratch."""
        requests = (e for e in self.template.events if isinstance(e, Allocated | Scratch))
        sizes = [request.num_bytes for request in requests]
        return self.template.indices[Allocated], *self._split_sizes(sizes)

    @cached_property
    def work(self) -> tuple[dict[int, int], list[list[Any]], list[int], list[int]]:
        """The different operations, numbered in order (operations that repeat are one object): the
        number of each event, by its index; the columns of `Computed`'s fields, with the fixed bytes
        and FLOPs; and then the bytes and the FLOPs per image."""
        number_by_id: dict[int, int] = {}
        numbers: dict[int, int] = {}
        operations: list[Computed] = []
        for index, operation in enumerate(self.template.events):
            if type(operation) is not Computed:
                continue
            number = numbers[index] = number_by_id.setdefault(id(operation), len(operations))
            if number == len(operations):
                operations.append(operation)
        columns = list(map(list, zip(*operations, strict=True)))
        columns = columns or [[] for _ in Computed._fields]
        columns[_BYTES], byte_slopes = self._split_sizes(columns[_BYTES])
        columns[_FLOPS], flop_slopes = self._split_sizes(columns[_FLOPS])
        return numbers, columns, byte_slopes, flop_slopes

    @cached_property
    def scratch(self) -> dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[int]]:
        """The numbers of the requests for scratch, by law, sizes and the slopes of these."""
        numbers: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[int]] = {}
        events = self.template.events
        for number, index in enumerate(self.requests[0]):
            if type(event := events[index]) is Scratch:
                slopes = tuple(self._split_sizes(event.sizes)[1])
                numbers.setdefault((event.law, event.sizes, slopes), []).append(number)
        return numbers

    def _split_sizes(self, sizes: Sequence[int]) -> tuple[list[int], list[int]]:
        """The fixed part of each of the `sizes`, which may be negative, and the part per image."""
        batch_size = self.template.batch_size
        slopes = [(size + _HALF) >> _HUGE_BITS if batch_size == HUGE else 0 for size in sizes]
        pairs = zip(sizes, slopes, strict=True)
        return [size - batch_size * slope for size, slope in pairs], slopes


@dataclass
class ShapeLedgers:
    """The ledgers of one step on shapes at any batch, from at most three runs of it: the step is
    affine in the batch. `run` makes the ledger at a batch.

    The first batch runs as it is; the second makes the affine ledger, which gives all others. A
    batch of 1 always runs by itself.
    """

    run: Callable[[int], Ledger]
    ledgers: dict[int, Ledger] = field(default_factory=dict)
    affine: AffineLedger | None = None

    def ledger(self, batch_size: int) -> Ledger:
        """The ledger at `batch_size`."""
        if batch_size in self.ledgers:
            return self.ledgers[batch_size]
        if batch_size > 1 and (self.affine is not None or max(self.ledgers, default=1) > 1):
            if self.affine is None:
                self.affine = AffineLedger.from_huge(self.run(HUGE))
            return self.affine.ledger(batch_size)
        self.ledgers[batch_size] = self.run(batch_size)
        return self.ledgers[batch_size]


# The kinds of torch's operations, by name. To follow one more operation, add its name here. Names
# are those of ATen without `aten::`.

MATMULS = frozenset(
    ("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "_addmm_activation",
     "_scaled_mm", "_grouped_mm")
)  # fmt: skip
CONVOLUTIONS = frozenset(("convolution", "convolution_backward", "_convolution"))
REDUCTIONS = frozenset(
    ("sum", "mean", "amax", "amin", "argmax", "argmin", "max", "min", "prod", "any", "all", "var",
     "var_mean", "std", "std_mean", "norm", "linalg_vector_norm", "logsumexp", "cumsum", "cumprod",
     "topk", "sort", "native_layer_norm", "native_layer_norm_backward", "native_group_norm",
     "native_group_norm_backward", "native_batch_norm", "native_batch_norm_backward",
     "_native_batch_norm_legit", "_fused_rms_norm", "_fused_rms_norm_backward", "_softmax",
     "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "nll_loss_forward",
     "nll_loss_backward", "_foreach_norm", "avg_pool2d", "max_pool2d_with_indices",
     "_adaptive_avg_pool2d", "_amp_foreach_non_finite_check_and_unscale_")
)  # fmt: skip
COPIES = frozenset(
    ("_to_copy", "clone", "copy_", "constant_pad_nd", "roll", "flip", "cat", "stack", "index",
     "index_put", "index_put_", "_index_put_impl_", "index_select", "gather", "scatter",
     "scatter_add", "scatter_add_", "embedding", "embedding_dense_backward", "repeat",
     "slice_scatter", "select_scatter", "slice_backward", "select_backward", "im2col", "col2im")
)  # fmt: skip
# These operations start no kernel: they make or rename tensors.
NO_KERNEL = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "device", "detach",
     "_local_scalar_dense", "lift_fresh", "set_", "resize_")
)  # fmt: skip


def operation_kind(name: str) -> OperationKind:
    """The kind of an operation that computes; one that is in no set works element by element."""
    if name in MATMULS:
        return "matmul"
    if name in CONVOLUTIONS:
        return "conv"
    if "attention" in name:
        return "attention"
    if name in REDUCTIONS:
        return "reduction"
    return "copy" if name in COPIES else "pointwise"
