"""Torch's own allocator history as the events of a ledger: each request as torch made it, in order.

The text that torch's allocator writes beside each entry is ours: the number of phases that had
ended, a bar, and the module that was running. Each thread has its own text; requests of autograd's
threads outside of any module have none.
"""

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import utils as dynamo
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from planner.core.schema.record import Phase
from planner.ledger.ledger import Allocated, CacheFreed, Category, Event, Freed, PhaseEnded, Tagged

# FSDP2's streams (`FSDPCommContext.lazy_init`), and the category of what lies in their pools.
STREAMS: Mapping[str, Category] = {
    "all_gather_copy_in": "parameters", "all_gather": "parameters",
    "reduce_scatter": "gradients", "all_reduce": "gradients",
}  # fmt: skip
UNSHARDED = "unsharded weights"  # the label of requests by which FSDP2 gives weights memory again
MAX_ENTRIES = 4_000_000  # of the history: a step of Swin-B has 20,000
PAUSE_SECONDS = 0.0005  # before and after an instant that tells entries apart
Entry = dict[str, Any]  # as torch.cuda.memory._snapshot has it


_stamps: list[tuple[int, str]] = []  # (microseconds since the epoch, the text from then on)


def _stamp(text: str) -> None:
    """Notes when a text begins: before 2.10 torch writes no text beside an entry, and entries get
    theirs by their times. Modules change too fast for that, so only phases are noted."""
    if text.endswith("|"):
        time.sleep(PAUSE_SECONDS)
        _stamps.append((time.time_ns() // 1000, text))
        time.sleep(PAUSE_SECONDS)


write_beside: Callable[[str], None] = getattr(torch._C, "_cuda_setMemoryMetadata", _stamp)


@contextmanager
def history() -> Iterator[list[Entry]]:
    """The entries of the current device's allocator within the block; complete when it ends."""
    entries: list[Entry] = []
    _stamps.clear()
    record = torch.cuda.memory._record_memory_history
    record("all", context=None, stacks="python", max_entries=MAX_ENTRIES)
    try:
        yield entries
        traces = torch.cuda.memory._snapshot()["device_traces"]
        entries += traces[torch.cuda.current_device()]
        for entry in entries if _stamps else ():
            at = bisect_right(_stamps, (entry["time_us"], "~"))
            entry["user_metadata"] = _stamps[at - 1][1] if at else ""
    finally:
        record(enabled=None)


class Marks:
    """Writes beside each entry of the history how many phases have ended, and the running module.

    `nn.Module.__call__` is replaced while `writing`: a hook would change how a module is called,
    and so how long its inputs live. `tags` name what is alive when so many phases have ended:
    (address of a storage, its category, address of the weight whose gradient it is, or 0).
    """

    def __init__(self, write: Callable[[str], None] = write_beside) -> None:
        self.phases: list[PhaseEnded] = []
        self.tags: dict[int, list[tuple[int, Category, int]]] = {}
        self.names: dict[int, str] = {}
        self.thread = threading.local()
        self.write = write

    def name(self, root: nn.Module) -> None:
        """Names the modules of `root` as `named_modules` does."""
        self.names = {id(module): name for name, module in root.named_modules()}

    def current(self) -> str:
        """The innermost running module's name; "" in the root, in backward and in the optimizer."""
        return getattr(self.thread, "path", None) or ""

    def end(self, phase: Phase, step: int) -> None:
        """Ends a phase; `tag` may follow."""
        self.phases.append(PhaseEnded(phase, step))
        self.write(f"{len(self.phases)}|")

    def tag(
        self, tensors: Iterable[Tensor], category: Category, weights: Iterable[Tensor] = ()
    ) -> None:
        """Gives tensors that are alive at the end of the last phase their category; to gradients,
        in the same order, their weights."""
        weights_left = iter(weights)
        tags = self.tags.setdefault(len(self.phases), [])
        for tensor in tensors:
            weight = next(weights_left, None)
            weight_address = _addresses(weight)[0] if weight is not None else 0
            tags += ((address, category, weight_address) for address in _addresses(tensor))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Within, the names of running modules are written."""
        call, main = nn.Module.__call__, threading.main_thread()

        def call_marked(module: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or (name := self.names.get(id(module))) is None:
                return call(module, *args, **kwargs)
            outer = getattr(self.thread, "path", None)
            self.thread.path = name
            self.write(f"{len(self.phases)}|{name}")
            try:
                return call(module, *args, **kwargs)
            finally:
                self.thread.path = outer
                is_ours = outer is not None or threading.current_thread() is main
                self.write(f"{len(self.phases)}|{outer or ''}" if is_ours else "")

        nn.Module.__call__ = call_marked  # type: ignore[method-assign]
        # Dynamo takes ours for torch's own.
        dynamo.unpatched_nn_module_call = call_marked
        self.write(f"{len(self.phases)}|")
        try:
            yield
        finally:
            nn.Module.__call__ = call  # type: ignore[method-assign]
            dynamo.unpatched_nn_module_call = call
            self.write("")


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors that a wrapper subclass is made of; of any other tensor, itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    parts = [getattr(tensor, name) for name in names]  # a DTensor's mesh is among them
    return [p for part in parts if isinstance(part, Tensor) for p in plain_tensors(part)]


def _addresses(tensor: Tensor) -> list[int]:
    """The addresses of the storages on the device that `tensor` is made of."""
    return [p.untyped_storage().data_ptr() for p in plain_tensors(tensor) if p.is_cuda]


@dataclass
class Pools:
    """What is known of storages that are no tensor of the training's.

    `staying` has the category of storages that stay to the end, by their bytes: cuBLAS's
    workspaces, DDP's buckets. `streams` are the names of the streams beside the one that computes,
    by address. `buckets` are the sizes in bytes of those that ZeRO's gradients wait in."""

    staying: Mapping[int, Category]
    streams: dict[int, str]
    buckets: Collection[int] = ()

    def named(self, stream: int) -> str:
        """The name of a stream: FSDP2's, or a number in the order in which streams are met."""
        return self.streams.setdefault(stream, f"stream {len(self.streams) + 1}") if stream else ""

    def category(self, stream: str, label: str, num_bytes: int) -> Category | None:
        if num_bytes in self.buckets:
            return "gradients"
        return "parameters" if label == UNSHARDED else STREAMS.get(stream)


def marked(entries: Iterable[Entry]) -> Iterator[tuple[int, str, Entry]]:
    """(number of phases that had ended, text behind the bar, entry). An entry without a text has
    the number of the one before."""
    ended = 0
    for entry in entries:
        number, _, text = entry["user_metadata"].partition("|")
        ended = int(number) if number else ended
        yield ended, text, entry


def read_events(
    entries: Sequence[Entry],
    marks: Marks,
    labels: Mapping[int, Sequence[str]],
    pools: Pools,
) -> list[Event]:
    """The events of a ledger except the computed ones. `labels` name the operations behind the
    requests, by the number of phases that had ended."""
    events: list[Event] = []
    storages: dict[int, int] = {}  # by address, of what is alive
    tags: dict[int, Tagged] = {}  # by storage
    sizes: list[int] = []
    ended = served = 0

    def end_phases(until: int) -> None:
        nonlocal ended, served
        while ended < until:
            ended, served = ended + 1, 0
            for address, category, weight in marks.tags.get(ended, ()):
                if storage := storages.get(address):
                    tags.setdefault(storage, Tagged(storage, category, storages.get(weight, 0)))
            events.append(marks.phases[ended - 1])

    for number, path, entry in marked(entries):
        end_phases(number)
        action = entry["action"]
        if action == "alloc":
            sizes.append(entry["size"])
            storages[entry["addr"]] = len(sizes)
            names = labels.get(ended, ())
            label = names[served] if served < len(names) else ""
            stream = pools.named(entry["stream"])
            if category := pools.category(stream, label, entry["size"]):
                tags[len(sizes)] = Tagged(len(sizes), category)
            events.append(Allocated(len(sizes), entry["size"], label, path, stream))
            served += 1
        elif action == "free_completed" and entry["addr"] in storages:
            events.append(Freed(storages.pop(entry["addr"])))
        elif action == "segment_free" and not (events and type(events[-1]) is CacheFreed):
            events.append(CacheFreed(path))
    end_phases(len(marks.phases))
    for storage in storages.values():
        category = pools.staying.get(sizes[storage - 1])
        if category is not None and storage not in tags:
            tags[storage] = Tagged(storage, category)
    return list(_with_tags(list(_in_steady_order(events)), tags))


def _in_steady_order(events: Iterable[Event]) -> Iterator[Event]:
    """The events with each run of releases sorted by storage: autocast empties its cache in the
    order of addresses, which differ from one process to the next."""
    for kind, run in groupby(events, type):
        if kind is Freed:
            yield from sorted(run, key=attrgetter("storage"))
        else:
            yield from run


def _with_tags(events: Sequence[Event], tags: Mapping[int, Tagged]) -> Iterator[Event]:
    """The events with each storage's tag right behind its allocation. A storage without a tag that
    outlives its forward, or that a forward leaves which runs again in backward, is an activation.
    """
    saved = _outlive_forward(events) | _recomputed(events)
    for event in events:
        yield event
        if type(event) is Allocated:
            if event.storage in tags:
                yield tags[event.storage]
            elif event.storage in saved:
                yield Tagged(event.storage, "activations")


def _outlive_forward(events: Iterable[Event]) -> set[int]:
    saved, fresh = set[int](), set[int]()
    for event in events:
        if type(event) is Allocated:
            fresh.add(event.storage)
        elif type(event) is Freed:
            fresh.discard(event.storage)
        elif type(event) is PhaseEnded:
            if event.phase == "forward":
                saved |= fresh
            fresh.clear()
    return saved


def _recomputed(events: Iterable[Event]) -> set[int]:
    """The storages that modules request in backward and that are alive when backward itself
    requests memory again."""
    saved, running, since = set[int](), set[int](), list[Event]()
    for event in events:
        if type(event) is not PhaseEnded:
            since.append(event)
            continue
        running.clear()
        for inner in since if event.phase == "backward" else ():
            if type(inner) is Allocated and inner.path:
                running.add(inner.storage)
            elif type(inner) is Allocated:
                saved |= running
                running.clear()
            elif type(inner) is Freed:
                running.discard(inner.storage)
        since.clear()
    return saved
