"""The ledger: what one training step allocates, frees, computes and moves, in order; and the same
step at any batch size: the events stay, and their sizes are affine in the batch.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

from planner.core.schema.setting import Collective, Group

Category = Literal[
    "parameters",
    "buffers",
    "gradients",
    "optimizer_state",
    "activations",
    "temporaries",
    "workspace",
]
CATEGORIES: tuple[Category, ...] = (
    "parameters", "buffers", "gradients", "optimizer_state", "activations", "temporaries",
)  # fmt: skip
# Where an update ran that backward made of one weight as soon as its gradient was there: the path
# of its events. The first of them is the call itself, which costs the host and no device.
IN_BACKWARD = "optimizer in backward"
OPTIMIZER_CALL = "Optimizer.step"
# A call of code that was compiled for one weight's update: it costs the host and no device.
COMPILED_CALL = "compiled update"
# One ledger holds at most so many micro-batches of a step: the third repeats the second, or the
# first, where the second is the last and sends what the others do not.
RECORDED_MICRO_BATCHES = 2
WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"  # sizes cuBLAS's; deterministic training sets it
OperationKind = Literal[
    "matmul", "conv", "grouped conv", "attention", "pointwise", "reduction", "copy", "transfer"
]
# The names of transfers: over the link between the device and the host, whose memory is pinned.
TO_HOST, TO_DEVICE = "copy to the host", "copy to the device"
# Those of an optimizer on the host. Gradients leave beside the stream that computes: no kernel of
# the step's own.
GRADIENT_TO_HOST, WEIGHT_TO_DEVICE = "gradient to the host", "weight to the device"


class Allocated(NamedTuple):
    """A storage of `num_bytes` comes to life. `label` names the operation that asked for it and
    `path` the module it ran in. `stream` is the CUDA stream whose pool of the caching allocator it
    is taken from and goes back to: "" is the one that computes."""

    storage: int
    num_bytes: int
    label: str
    path: str = ""
    stream: str = ""


class Scratch(NamedTuple):
    """A kernel asks for a storage beside its results: `Freed` follows before it returns. How large
    depends on the device, by the law of that name in `planner.memory.scratch`, from `sizes` (rows,
    columns …) that are affine in the batch; it may be nothing."""

    storage: int
    law: str
    sizes: tuple[int, ...]
    label: str
    path: str = ""

    @property
    def num_bytes(self) -> int:
        """Nothing, where no device is named."""
        return 0

    @property
    def stream(self) -> str:
        return ""


class Freed(NamedTuple):
    """The last reference to a storage is gone."""

    storage: int


class Emptied(NamedTuple):
    """The caching allocator gives its wholly free segments back to the driver, as it does once
    cuDNN has tried its algorithms for a convolution."""

    path: str = ""


class Tagged(NamedTuple):
    """From here on a storage counts as `category` (saved for backward, kept as a gradient …).

    `weight` is the storage of the weight that a gradient is of; 0 for all others.
    """

    storage: int
    category: Category
    weight: int = 0


class Marked(NamedTuple):
    """A phase has just ended. `step` counts optimizer steps from 0; a steady one is 1 or later."""

    phase: str
    step: int


class Computed(NamedTuple):
    """An operation ran: `kernels` launches doing `flops` FLOPs (a multiply-add is two) and moving
    `num_bytes` bytes to and from device memory (a transfer: over the host's link), in `dtype`.
    `path` is the module it ran in."""

    name: str
    kind: OperationKind
    dtype: str
    flops: int
    num_bytes: int
    kernels: int
    path: str


Operation = tuple[str, Computed]  # with its phase first


class Sent(NamedTuple):
    """The host hands a collective over: `num_bytes` of the whole array (as nccl-tests counts: of an
    all-gather what comes out, of a reduce-scatter what goes in), in `dtype`. The devices of `group`
    carry out what they were handed one after the other, beside what is computed. One that
    `follows` what was computed before waits for it (gradients are summed when they are there);
    weights are gathered as soon as the host says so. `handle` is what `Awaited` calls it."""

    handle: int
    collective: Collective
    num_bytes: int
    dtype: str
    group: Group
    follows: bool
    path: str = ""


class Awaited(NamedTuple):
    """What is computed from here on waits until collective `handle` is done."""

    handle: int


class Exchanged(NamedTuple):
    """A collective handed over or awaited within a step, in `phase` of its micro-batch number
    `micro_batch` (from 0): `place` of the step's operations come before it."""

    phase: str
    micro_batch: int
    place: int
    event: Sent | Awaited


_COMPUTED = partial(tuple.__new__, Computed)  # a NamedTuple's own takes three times as long
Event = Allocated | Scratch | Freed | Emptied | Tagged | Marked | Computed | Sent | Awaited


@dataclass(eq=False)
class EventsAt(Sequence[Any]):
    """The events of a line at a batch, on a device where `scratch_bytes` says how large its scratch
    is. They are made once one of them is looked at: an estimate asks for sizes and work only."""

    line: AffineLedger
    batch_size: int
    scratch_bytes: Callable[[str, tuple[int, ...]], int] | None = None

    @cached_property
    def sizes(self) -> list[int]:
        """The bytes of each request, in order."""
        _, fixed, slopes = self.line.requests
        batch_size = self.batch_size
        sizes = [n + batch_size * slope for n, slope in zip(fixed, slopes, strict=True)]
        if self.scratch_bytes is not None:
            for law, of_law, numbers in self._scratch:
                num_bytes = self.scratch_bytes(law, of_law)
                for number in numbers:
                    sizes[number] = num_bytes
        return sizes

    @cached_property
    def work(self) -> list[Computed]:
        """The operations, each once."""
        _, columns, of_bytes, of_flops = self.line.work
        made = list(columns)
        for column, slopes in (3, of_flops), (4, of_bytes):
            pairs = zip(columns[column], slopes, strict=True)
            made[column] = [n + self.batch_size * slope for n, slope in pairs]
        return list(map(_COMPUTED, zip(*made, strict=True)))

    @cached_property
    def _made(self) -> tuple[Any, ...]:
        events: list[Any] = list(self.line.at.events)
        places, is_known = self.line.requests[0], self.scratch_bytes is not None
        for place, number in self.line.work[0].items():
            events[place] = self.work[number]
        for place, num_bytes in zip(places, self.sizes, strict=True):
            if type(events[place]) is Allocated:
                events[place] = events[place]._replace(num_bytes=num_bytes)
            elif is_known:
                events[place] = Allocated(events[place][0], num_bytes, *events[place][3:])
        for _, sizes, numbers in () if is_known else self._scratch:
            for place in (places[number] for number in numbers):
                events[place] = events[place]._replace(sizes=sizes)
        return tuple(events)

    @cached_property
    def _scratch(self) -> list[tuple[str, tuple[int, ...], list[int]]]:
        """(law, its sizes at this batch, the numbers of the requests) of scratch."""
        found, more = [], self.batch_size - self.line.at.batch_size
        for (law, of_law, slopes), numbers in self.line.scratch.items():
            sizes = tuple([n + more * slope for n, slope in zip(of_law, slopes, strict=True)])
            found.append((law, sizes, numbers))
        return found

    def __len__(self) -> int:
        return len(self.line.at.events)

    def __getitem__(self, index: Any) -> Any:
        return self._made[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, EventsAt) and other.line.at is self.line.at:
            own, its = [(e.batch_size, not e.scratch_bytes, e.sizes) for e in (self, other)]
            return own == its
        return isinstance(other, EventsAt | tuple) and self._made == tuple(other)


@dataclass(frozen=True)
class Ledger:
    """All events of building a model and running its first optimizer steps at one batch size.

    The last step is the steady one. It is the second, as the optimizer's state exists from the end
    of the first on; where DDP rebuilds its buckets, it is the third.
    """

    events: tuple[Event, ...] | EventsAt
    batch_size: int
    num_parameters: int
    notes: tuple[str, ...] = field(default=())
    # What forward saves in a pool that is never given back, so that no growth shows it.
    pooled_saved_bytes: int = 0
    # What such a pool is asked for and given back, as `planner.memory.replay` takes it.
    pool_requests: tuple[int, ...] = field(default=(), repr=False)
    # Of what is live at the peak, what need not be there: it depends on when the device gets to a
    # layer, and the events are those of the most.
    doubtful_bytes: int = 0
    # What is freed, and yet cannot be used before another stream is done with it, at most.
    late_bytes: int = 0
    # What the task calls an item of its batch, and the class of the optimizer that it makes, where
    # it makes one: "" is not known, or none.
    unit: str = ""
    own_optimizer: str = ""
    # Whether torch's own CUDA code made the events: cuBLAS's workspaces are among them.
    is_recorded: bool = False

    @property
    def environment(self) -> Mapping[str, str]:
        """This process's; what is recorded has its workspaces among its events."""
        return {**os.environ, **({WORKSPACE_VARIABLE: ":0:0"} if self.is_recorded else {})}

    @property
    def template(self) -> Ledger:
        """The ledger that has these events but for their sizes: what does not depend on sizes is
        read off it, once for all batches. It may be this one."""
        return self.events.line.at if isinstance(self.events, EventsAt) else self

    def __hash__(self) -> int:
        """Without a look at every event: ledgers are kept by what is read of them."""
        return hash((len(self.events), self.batch_size, self.num_parameters, self.notes))

    @cached_property
    def places(self) -> dict[type, list[int]]:
        """The indices of the events of each kind; scratch is among what is allocated."""
        requests: list[int] = []
        found: dict[type, list[int]] = {Allocated: requests, Scratch: requests}
        found |= {kind: [] for kind in (Freed, Emptied, Tagged, Marked, Computed, Sent, Awaited)}
        for index, kind in enumerate(map(type, self.events)):
            found[kind].append(index)
        return found

    def operations(self, step: int = 1) -> Iterator[Operation]:
        """(phase, operation) of optimizer step `step`, in order; phase is forward, backward,
        optimizer or zero_grad, and optimizer too where it steps in backward."""
        events: Sequence[Any] = self.events
        places = self._work.get(step, ())
        if isinstance(events, EventsAt):
            numbers = events.line.work[0]
            events, places = events.work, [(phase, numbers[place]) for phase, place in places]
        return ((phase, events[place]) for phase, place in places)

    def exchanges(self, step: int = 1) -> tuple[Exchanged, ...]:
        """What optimizer step `step` sends and awaits, in order."""
        return tuple(self.template._exchanges.get(step, ()))

    @cached_property
    def _exchanges(self) -> dict[int, list[Exchanged]]:
        """By optimizer step."""
        found: dict[int, list[Exchanged]] = {}
        counts: dict[int, list[int]] = {}  # by step: operations, and micro-batches, until the mark
        since: list[tuple[int, Sent | Awaited]] = []
        num_operations = 0
        for event in self.events:
            if type(event) is Computed:
                num_operations += 1
            elif type(event) is Sent or type(event) is Awaited:
                since.append((num_operations, event))
            elif type(event) is Marked:
                count = counts.setdefault(event.step, [0, 0])
                found.setdefault(event.step, []).extend(
                    Exchanged(event.phase, count[1], count[0] + place, sent)
                    for place, sent in since
                )
                count[0] += num_operations
                count[1] += event.phase == "backward"
                since, num_operations = [], 0
        return found

    @cached_property
    def operation_names(self) -> frozenset[str]:
        """The names of all operations."""
        if self.template is not self:
            return self.template.operation_names
        events: Sequence[Any] = self.events
        return frozenset([events[place][0] for place in self.places[Computed]])

    @cached_property
    def _work(self) -> dict[int, list[tuple[str, int]]]:
        """By optimizer step, (phase, index) of its operations."""
        if self.template is not self:
            return self.template._work
        events: Sequence[Any] = self.events
        found: dict[int, list[tuple[str, int]]] = {}
        operations, done = self.places[Computed], 0
        for index in self.places[Marked]:
            begun, done = done, bisect_left(operations, index)
            phase, step = events[index]
            found.setdefault(step, []).extend([
                ("optimizer" if events[place][6] == IN_BACKWARD else phase, place)
                for place in operations[begun:done]
            ])  # fmt: skip
        return found


# A recorded step at any batch size.
#
# A recording at a huge batch gives every size as fixed + batch * per image. A batch of 1 is another
# step (dimensions of size 1 change which copies happen), so it is recorded by itself.

Record = Callable[[int], Ledger]  # the ledger at a batch size
# A batch beyond all sizes that do not grow with it: of a size there, fixed + HUGE * per image, both
# parts are read off like digits.
_HUGE_BITS = 40
HUGE = 1 << _HUGE_BITS
_HALF = HUGE // 2


@dataclass(frozen=True)
class AffineLedger:
    """The ledger at one batch, and what is `known` of its `slopes`: by event, the bytes and FLOPs
    that an image more adds, or of scratch what it adds to each of its sizes. None: they are read
    off a ledger at HUGE.

    An event without a slope is the same at every batch.
    """

    at: Ledger
    known: Mapping[int, tuple[int, ...]] | None

    @cached_property
    def slopes(self) -> Mapping[int, tuple[int, ...]]:
        if self.known is not None:
            return self.known
        places, _, slopes = self.requests
        numbers, _, *of_work = self.work
        found = {index: (slope, 0) for index, slope in zip(places, slopes, strict=True)}
        found |= {index: (of_work[0][n], of_work[1][n]) for index, n in numbers.items()}
        scratch = {places[n]: each for (_, _, each), ns in self.scratch.items() for n in ns}
        return {index: each for index, each in (found | scratch).items() if any(each)}

    @classmethod
    def from_huge(cls, recorded: Ledger) -> AffineLedger:
        """The line read off one recording at batch HUGE, of a step that is known to be affine and
        that no batch is too large for: one on shapes."""
        assert recorded.batch_size == HUGE
        return cls(recorded, None)

    def ledger(self, batch_size: int) -> Ledger:
        """The ledger at another batch of 2 or more."""
        assert batch_size > 1, "a batch of 1 is another step"
        if batch_size == self.at.batch_size:
            return self.at
        return replace(self.at, events=EventsAt(self, batch_size), batch_size=batch_size)

    @cached_property
    def requests(self) -> tuple[list[int], list[int], list[int]]:
        """Of each request, in order: its index, its bytes without an image, and those per image.
        Scratch has none."""
        events: Sequence[Any] = self.at.events
        places = self.at.places[Allocated]
        sizes = [events[i][1] if type(events[i]) is Allocated else 0 for i in places]
        return places, *self._lines(places, sizes, 0, Allocated)

    @cached_property
    def work(self) -> tuple[dict[int, int], list[list[Any]], list[int], list[int]]:
        """The operations, each once (work that repeats is one object): its number by index, their
        fields one by one, without an image, and the bytes and the FLOPs that one adds."""
        events: Sequence[Any] = self.at.events
        known: dict[int, int] = {}
        numbers: dict[int, int] = {}
        places: list[int] = []
        for index in self.at.places[Computed]:
            number = numbers[index] = known.setdefault(id(events[index]), len(places))
            if number == len(places):
                places.append(index)
        columns = list(map(list, zip(*[events[index] for index in places], strict=True)))
        columns = columns or [[] for _ in Computed._fields]
        columns[4], slopes = self._lines(places, columns[4], 0, Computed)
        columns[3], of_flops = self._lines(places, columns[3], 1, Computed)
        return numbers, columns, slopes, of_flops

    def _lines(
        self, places: list[int], sizes: list[int], field: int, kind: type[Event]
    ) -> tuple[list[int], list[int]]:
        """What of the `sizes` of events is fixed, and what an image adds: `field` of the slopes of
        those of this kind, and nothing to others."""
        known, events, batch_size = self.known, self.at.events, self.at.batch_size
        if known is None:
            slopes = _per_image(sizes)
        else:
            slopes = [
                known[index][field] if index in known and type(events[index]) is kind else 0
                for index in places
            ]
        lines = zip(sizes, slopes, strict=True)
        return [size - batch_size * slope for size, slope in lines], slopes

    @cached_property
    def scratch(self) -> dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[int]]:
        """The numbers of the requests for scratch, by law, sizes and what an image adds to them."""
        found: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[int]] = {}
        events: Sequence[Any] = self.at.events
        known = self.known
        for number, index in enumerate(self.requests[0]):
            if type(event := events[index]) is Scratch:
                sizes = event[2]
                slopes = _per_image(sizes) if known is None else known.get(index, (0,) * len(sizes))
                found.setdefault((event[1], sizes, tuple(slopes)), []).append(number)
        return found


@dataclass
class Recorder:
    """Ledgers at any batch of one step on shapes, which is affine, from at most three recordings.

    The first batch is recorded as it is; the second one asked for makes the affine ledger, from
    which all others are read. A batch of 1 is always recorded by itself.
    """

    record: Record
    known: dict[int, Ledger] = field(default_factory=dict)
    affine: AffineLedger | None = None

    def line(self) -> AffineLedger:
        """The ledger of all batches from 2 on, by one recording."""
        if self.affine is None:
            self.affine = AffineLedger.from_huge(self.record(HUGE))
        return self.affine

    def ledger(self, batch_size: int) -> Ledger:
        """The ledger at `batch_size`."""
        if batch_size in self.known:
            return self.known[batch_size]
        if batch_size > 1 and (self.affine is not None or max(self.known, default=1) > 1):
            return self.line().ledger(batch_size)
        self.known[batch_size] = self.record(batch_size)
        return self.known[batch_size]


def _per_image(sizes: Iterable[int]) -> list[int]:
    """Of sizes at batch HUGE; what is fixed of one may be negative."""
    return [(size + _HALF) >> _HUGE_BITS for size in sizes]


# Which kind of work an operation of torch is, by its name. To follow one more operation, add its
# name here. Names are those of ATen without `aten::`.

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
# What starts no kernel: it makes or renames tensors.
NO_KERNEL = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "device", "detach",
     "_local_scalar_dense", "lift_fresh", "set_", "resize_")
)  # fmt: skip


def kind_of(name: str) -> OperationKind:
    """The kind of an operation that computes: what is in no set works element by element."""
    if name in MATMULS:
        return "matmul"
    if name in CONVOLUTIONS:
        return "conv"
    if "attention" in name:
        return "attention"
    if name in REDUCTIONS:
        return "reduction"
    return "copy" if name in COPIES else "pointwise"
