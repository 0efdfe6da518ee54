"""ZeRO's events inserted into the ledger of one device: any model's, on shapes or recorded.

What runs forward and backward is the same on one device as on many. So the ledger of one device is
read event by event: each weight goes when it was flattened, each gradient when it was copied, and
the optimizer's step is another one. Events of one device keep their place in it (`sources`), so a
line over the batch stays a line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from planner.core.errors import UnsupportedError
from planner.core.schema import ResolvedSetting, TrainSetting
from planner.core.schema.distribution import ALONE
from planner.ledger.affine import AffineLedger
from planner.ledger.ledger import (
    RECORDED_MICRO_BATCHES,
    Allocated,
    Event,
    Freed,
    Ledger,
    Marked,
    Scratch,
    Tagged,
)
from planner.step.tensor import DTYPE_BYTES, Device, Storage, Tensor
from planner.step.zero.layout import Layout
from planner.step.zero.notes import zero_notes
from planner.step.zero.stage3 import Zero3Step
from planner.step.zero.step import SCOPE, ZeroStep

_CAST = "_to_copy"


@dataclass(frozen=True)
class ZeroLedger:
    """The events of one of several devices. `sources` says which of one device's each of them is:
    -1 for those that are not."""

    ledger: Ledger
    sources: tuple[int, ...]

    def line(self, one: AffineLedger) -> AffineLedger:
        """The same over the batch, where `one` is the line of one device."""
        slopes = {
            place: one.slopes[source]
            for place, source in enumerate(self.sources)
            if source in one.slopes
        }
        return AffineLedger(self.ledger, slopes)


def on_one_device(setting: TrainSetting) -> ResolvedSetting:
    """The setting whose ledger ZeRO's events are inserted into.

    DeepSpeed's engine drops gradients and clips by itself. Stages 2 and 3 sum them in each
    micro-batch, as if it was the only one.
    """
    adds_up = setting.parallelism == "zero1"
    return ResolvedSetting(
        setting.model_copy(
            update={
                **ALONE,
                "accumulate": setting.accumulate if adds_up else 1,
                "zero_grad_to_none": True,
                "clip_grad": False,
            }
        )
    )


def unknown(setting: TrainSetting) -> UnsupportedError | None:
    """Why a setting under DeepSpeed is not estimated, where it is not."""
    if setting.compile == "off":
        return None
    return UnsupportedError(
        f"compile {setting.compile} under DeepSpeed is not estimated: no ledger of it was held "
        "against DeepSpeed's.",
        "Set compile=off, or choose ddp or fsdp.",
    )


@dataclass(frozen=True)
class Weight:
    """A trained weight: its storage, its size, and the module it is of (recorded models only)."""

    storage: int
    num_bytes: int
    path: str


def weights_of(ledger: Ledger) -> tuple[list[Weight], dict[int, int], dict[int, str]]:
    """The weights that are trained, in the order of `module.parameters()`; by storage of a gradient
    the weight that it is of; by weight what made its gradient.

    Raises UnsupportedError where gradients share a storage, as those of Swin V2's query and value
    biases do.
    """
    made: dict[int, Allocated] = {}
    known: list[Weight] = []
    gradients: dict[int, int] = {}  # storage -> that of its weight
    labels: dict[int, str] = {}  # by a weight's storage
    for event in ledger.events:
        if type(event) is Allocated:
            made[event.storage] = event
        elif type(event) is Tagged and event.category == "parameters":
            origin = made[event.storage]
            known.append(Weight(event.storage, origin.num_bytes, origin.path))
        elif type(event) is Tagged and event.category == "gradients":
            origin = made[event.storage]
            if origin.num_bytes != made[event.weight].num_bytes:
                raise UnsupportedError(
                    f"gradients of {origin.path or 'the model'} share a storage of "
                    f"{origin.num_bytes:,} bytes: ZeRO's shares cannot be dealt out.",
                    "Choose parallelism=ddp or fsdp.",
                )
            gradients[event.storage] = event.weight
            labels.setdefault(event.weight, origin.label)
    trained = [weight for weight in _registered(known) if weight.storage in labels]
    places = {weight.storage: place for place, weight in enumerate(trained)}
    return (
        trained,
        {storage: places[weight] for storage, weight in gradients.items()},
        {places[weight]: label for weight, label in labels.items()},
    )


def _registered(weights: Sequence[Weight]) -> list[Weight]:
    """They in the order of `module.parameters()`: a module's own before its children's. A trace has
    them the other way round, as `module.to(device)` makes them; without paths they are in order."""
    ranks: dict[tuple[str, ...], int] = {}
    for weight in weights:
        for parts in _ancestry(weight):
            ranks.setdefault(parts, len(ranks))
    return sorted(weights, key=lambda weight: [ranks[parts] for parts in _ancestry(weight)[1:]])


def _ancestry(weight: Weight) -> list[tuple[str, ...]]:
    """The modules that a weight lies in, from the root down to its own."""
    parts = tuple(weight.path.split(".")) if weight.path else ()
    return [parts[:depth] for depth in range(len(parts) + 1)]


def insert_zero_events(
    ledger: Ledger, setting: TrainSetting, rank: int | None = None
) -> ZeroLedger:
    """The ledger of device `rank` (None: the fullest) in ZeRO-1 or ZeRO-2, from
    `ledger`, that of `on_one_device(setting)`."""
    return _Insertion(ledger, setting, rank).run()


class _Insertion:
    """One pass over the events of one device."""

    def __init__(self, ledger: Ledger, setting: TrainSetting, rank: int | None) -> None:
        self.ledger = ledger
        self.setting = setting
        self.device = Device()
        self.device.num_storages = max(
            (e.storage for e in ledger.events if isinstance(e, Allocated | Scratch)), default=0
        )
        self.sources: list[int] = []
        self.weights, self.weight_of, labels = weights_of(ledger)
        dtype = "bfloat16" if setting.precision == "pure-bf16" else "float32"
        numels = tuple(weight.num_bytes // DTYPE_BYTES[dtype] for weight in self.weights)
        autocast = setting.autocast_dtype
        sent_in = {
            # `torch_autocast` sends gradients of linear and convolutional layers in its dtype:
            # those whose weights are cast, and so their gradients back.
            index: autocast if autocast is not None and _CAST in labels[index] else dtype
            for index in range(len(numels))
        }
        layout = Layout(numels, setting.world_size)
        step = Zero3Step if setting.parallelism == "zero3" else ZeroStep
        self.zero = step(self.device, setting, layout, dtype, sent_in, rank)
        self.sizes: dict[int, int] = {}  # of the storages that were let through
        self.dropped = {weight.storage for weight in self.weights}  # ZeRO frees these
        self.phase = "build"
        self.begins_forward = False
        self.micro_batch = 0
        self.recorded = min(setting.accumulate, RECORDED_MICRO_BATCHES)

    def run(self) -> ZeroLedger:
        for source, event in self._spread():
            self._follow(source, event)
            self._fill_sources()
        events = tuple(self.device.events)
        zero = self.zero
        notes = (*self.ledger.notes, *zero_notes(zero))
        sharded = replace(
            self.ledger,
            events=events,
            notes=notes,
            doubtful_bytes=zero.doubtful_bytes,
            late_bytes=zero.late_bytes,
        )
        return ZeroLedger(sharded, tuple(self.sources))

    def _fill_sources(self, source: int = -1) -> None:
        missing = len(self.device.events) - len(self.sources)
        self.sources += [source] * missing

    def _pass(self, source: int, event: Event) -> None:
        self.device.events.append(event)
        self._fill_sources(source)

    def _spread(self) -> Iterator[tuple[int, Event]]:
        """The events of one device with their places. Where each micro-batch is as if it was the
        only one, it comes as often as micro-batches are recorded, with storages of its own."""
        times = 1 if self.setting.parallelism == "zero1" else self.recorded
        run: list[tuple[int, Event]] = []
        for source, event in enumerate(self.ledger.events):
            run.append((source, event))
            if type(event) is Marked and event.phase != "forward":
                yield from run
                if event.phase == "backward":
                    for _ in range(1, times):
                        yield from self._again(run)
                run = []
        yield from run

    def _again(self, run: Sequence[tuple[int, Event]]) -> Iterator[tuple[int, Event]]:
        new: dict[int, int] = {}
        for source, event in run:
            if isinstance(event, Allocated | Scratch):
                self.device.num_storages += 1
                new[event.storage] = self.device.num_storages
                if event.storage in self.weight_of:
                    self.weight_of[new[event.storage]] = self.weight_of[event.storage]
                yield source, event._replace(storage=new[event.storage])
            elif type(event) is Freed:
                yield source, Freed(new.get(event.storage, event.storage))
            elif type(event) is Tagged:
                yield source, event._replace(storage=new.get(event.storage, event.storage))
            else:
                yield source, event

    def _follow(self, source: int, event: Event) -> None:
        if type(event) is Marked:
            self._end(source, event)
            return
        if self.begins_forward:
            self.begins_forward = False
            self._at(self.zero.begin_forward)
        if isinstance(event, Allocated | Scratch):
            if self.phase != "optimizer":
                self.sizes[event.storage] = event.num_bytes if type(event) is Allocated else 0
                self._pass(source, event)
        elif type(event) is Freed:
            if event.storage in self.sizes and event.storage not in self.dropped:
                del self.sizes[event.storage]
                self._pass(source, event)
        elif type(event) is Tagged:
            if event.storage in self.sizes and event.storage not in self.dropped:
                self._pass(source, event)
                if event.category == "gradients":
                    self._take(event.storage)
            elif self.phase == "build":
                self._pass(source, event)  # what weights are until they are flattened
        elif self.phase not in ("optimizer", "zero_grad"):
            self._pass(source, event)

    def _end(self, source: int, event: Marked) -> None:
        """A phase of one device ends: what ZeRO does at its end comes before that."""
        zero = self.zero
        if event.phase == "build":
            self._at(lambda: zero.build([self._adopt(weight.storage) for weight in self.weights]))
        elif event.phase in ("forward", "validation"):
            self._at(lambda: zero.end_forward(event.phase == "validation"))
        elif event.phase == "backward":
            self.micro_batch += 1
            self._at(lambda: zero.finish_backward(self.micro_batch == self.recorded))
        elif event.phase == "optimizer":
            self.micro_batch = 0
            self._at(zero.step)
        self._pass(source, event)
        following = {"forward": "backward", "backward": "optimizer", "optimizer": "zero_grad"}
        more = event.phase == "backward" and self.micro_batch < self.recorded
        self.phase = "forward" if more else following.get(event.phase, "forward")
        self.begins_forward = self.phase == "forward"

    def _at(self, act: Callable[[], None]) -> None:
        """What ZeRO does between two events of one device."""
        self.device.scope = SCOPE
        act()
        self.device.scope = ""
        self._fill_sources()

    def _take(self, storage: int) -> None:
        weight = self.weight_of[storage]
        self.dropped.add(storage)
        self.zero.gradients[weight] = self._adopt(storage)
        self._at(lambda: self.zero.take(weight, self.micro_batch + 1 == self.recorded))

    def _adopt(self, storage: int) -> Tensor:
        """A tensor of a storage of one device's, which is freed with it."""
        adopted = Storage.__new__(Storage)
        adopted.device, adopted.ident = self.device, storage
        adopted.num_bytes, adopted.holds = self.sizes[storage], 0
        adopted.category = "gradients"
        numel = adopted.num_bytes // DTYPE_BYTES[self.zero.dtype]
        return Tensor(adopted, (numel,), (1,), self.zero.dtype)
