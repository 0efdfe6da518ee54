"""What a step of several ranks hands over, and where what is computed waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from planner.core.schema import TrainSetting
from planner.core.schema.distribution import Collective, Group
from planner.ledger.ledger import Awaited, Event, Sent
from planner.recording.trees import tensors_in

COMPUTING = 0  # the address of the stream that computes
# Operations that hand a collective over: what it is, which argument is the whole array, and whose
# shards it concerns where these are copied (hsdp).
SENDING: Mapping[str, tuple[Collective, int, Group]] = {
    "c10d::_allgather_base_": ("all_gather", 0, "shard"),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1, "shard"),
    "c10d::allreduce_": ("all_reduce", 0, "replicate"),
    "c10d::broadcast_": ("broadcast", 0, "replicate"),
    "_c10d_functional::all_reduce": ("all_reduce", 0, "shard"),
}


class Traffic:
    """Hears which stream waits for which, and tells `add` what that means for the one that
    computes. What that stream sent itself is awaited by who first touches its bytes."""

    def __init__(self, setting: TrainSetting, add: Callable[[Event], None]) -> None:
        self.is_copied = setting.parallelism == "hsdp"
        self.add = add
        self.num_sent = 0
        self.last: dict[int, int] = {}  # stream: the last collective that it waits for
        self.awaited: set[int] = set()
        self.touched: dict[int, int] = {}  # address of a storage: the collective it is sent by
        # Streams that wait for all that is computed so far, and those that did as they sent.
        self.behind: set[int] = set()
        self.followed: set[int] = set()

    def hear(self, func: Any, args: tuple[Any, ...], path: str) -> None:
        """An operation of several ranks."""
        name, stream = func._schema.name, torch.cuda.current_stream().cuda_stream
        if name == "_c10d_functional::wait_tensor":
            self._wait(stream, self.last.get(stream))
        if name not in SENDING:
            return
        collective, place, group = SENDING[name]
        whole: Tensor = tensors_in(args[place])[0]
        follows = stream == COMPUTING or stream in self.behind
        self.behind.discard(stream)
        (self.followed.add if follows else self.followed.discard)(stream)
        self.num_sent += 1
        self.last[stream] = self.num_sent
        if stream == COMPUTING:
            self.touched[whole.untyped_storage().data_ptr()] = self.num_sent
        dtype = str(whole.dtype).removeprefix("torch.")
        whose: Group = group if self.is_copied else "world"
        num_bytes = whole.numel() * whole.element_size()
        self.add(Sent(self.num_sent, collective, num_bytes, dtype, whose, follows, path))

    def touch(self, tensors: list[Tensor], is_beside: bool) -> None:
        """An operation is about to read or write these on the stream that computes; or `is_beside`
        it, as DDP's hooks do: then who touches any of them later waits for the same."""
        if not self.touched:
            return
        places = [tensor.untyped_storage().data_ptr() for tensor in tensors]
        for handle in [self.touched[place] for place in places if place in self.touched]:
            if is_beside:
                self.touched |= dict.fromkeys(places, handle)
            else:
                self._wait(COMPUTING, handle)

    def end_backward(self) -> None:
        """Gradients are summed."""
        for handle in sorted(self.touched.values()):
            self._wait(COMPUTING, handle)
        self.touched.clear()

    def _wait(self, stream: int, handle: int | None) -> None:
        if handle is None or handle in self.awaited:
            return
        if stream == COMPUTING:
            self.awaited.add(handle)
            self.add(Awaited(handle))
        else:
            self.last[stream] = max(handle, self.last.get(stream, handle))

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Streams and events are heard within."""
        stream, event = torch.cuda.Stream, torch.cuda.Event
        record, wait, wait_stream = event.record, event.wait, stream.wait_stream

        def recorded(of: Any, on: Any = None) -> Any:
            on = on if on is not None else torch.cuda.current_stream()
            of.collective = self.last.get(on.cuda_stream)
            return record(of, on)

        def waited_for(of: Any, on: Any = None) -> None:
            on = on if on is not None else torch.cuda.current_stream()
            self._wait(on.cuda_stream, getattr(of, "collective", None))
            wait(of, on)

        def waits_stream(on: Any, other: Any) -> None:
            wait_stream(on, other)
            waited = other.cuda_stream
            if on.cuda_stream != COMPUTING and (waited == COMPUTING or waited in self.followed):
                self.behind.add(on.cuda_stream)

        with (
            mock.patch.object(event, "record", recorded),
            mock.patch.object(event, "wait", waited_for),
            mock.patch.object(stream, "wait_stream", waits_stream),
        ):
            yield
