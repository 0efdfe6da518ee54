"""One device's part of a step whose weights are sharded: `fully_shard` (FSDP2) under a process
group without other processes, with the streams that a GPU would run it on.

FSDP2 asks a device's module for streams and events; those of `Traffic` remember which stream is
current, so that each storage is counted in that stream's pool, and which collective a wait is for.
It frees weights by resizing their storages to nothing. Read in torch 2.13
(torch/distributed/fsdp/_fully_shard/).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_init,
    _fsdp_param_group,
    _fsdp_state,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore

from planner.core.collectives import Group
from planner.core.errors import UnsupportedError
from planner.core.schema import TrainSetting
from planner.step.sharding_notes import sharding_notes
from planner.trace.recorder import SENDING, Recorder
from planner.training.parallel.fully_sharded import Sharded, make_mesh, shard_in_place

# In the order in which FSDP2 makes them (`FSDPCommContext.lazy_init`).
STREAMS = ("all_gather_copy_in", "all_gather", "reduce_scatter", "all_reduce")
_ASKING = (_fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state)


class Traffic:
    """Stands for `torch.cuda` before FSDP2, and tells `recorder` which stream is current, what is
    sent, and what waits for it."""

    def __init__(self, recorder: Recorder, setting: TrainSetting) -> None:
        self.recorder = recorder
        self.is_copied = setting.parallelism == "hsdp"
        self._names = iter(STREAMS)
        self._awaited: set[int] = set()
        self._last: dict[str, int] = {}  # stream -> the last collective that it waits for
        # Streams that wait for all that is computed so far, and those that did as they sent.
        self._behind: set[str] = set()
        self._followed: set[str] = set()

    def send(self, name: str, args: tuple[Any, ...]) -> None:
        """The operation `name` hands a collective over."""
        collective, place, group = SENDING[name]
        whole: Tensor = args[place][0] if isinstance(args[place], list | tuple) else args[place]
        stream = self.recorder.stream
        follows = not stream or stream in self._behind
        self._behind.discard(stream)
        (self._followed.add if follows else self._followed.discard)(stream)
        num_bytes = whole.numel() * whole.element_size()
        dtype = str(whole.dtype).removeprefix("torch.")
        whose: Group = group if self.is_copied else "world"
        self._last[stream] = self.recorder.send(
            collective, num_bytes, dtype, whose, follows=follows
        )

    def wait(self, stream: str, handle: int | None) -> None:
        """From here on `stream` waits for a collective, where there is one."""
        if handle is None or handle in self._awaited:
            return
        if stream:
            self._last[stream] = max(handle, self._last.get(stream, handle))
        else:
            self._awaited.add(handle)
            self.recorder.wait(handle)

    def wait_for_stream(self, stream: str, other: str) -> None:
        """From here on `stream` waits for what `other` was given so far."""
        self.wait(stream, self._last.get(other))
        if stream and (not other or other in self._followed):
            self._behind.add(stream)

    def wait_for_last(self) -> None:
        """The current stream waits for the collective that it handed over last."""
        stream = self.recorder.stream
        self.wait(stream, self._last.get(stream))

    def last_on(self, stream: str) -> int | None:
        return self._last.get(stream)

    # What FSDP2 asks of a device's module.

    def Stream(self, priority: int = 0) -> _Stream:  # noqa: N802 (torch's name)
        return _Stream(self, next(self._names))

    def Event(self) -> _Event:  # noqa: N802 (torch's name)
        return _Event(self)

    def current_stream(self, *_: Any) -> _Stream:
        return _Stream(self, self.recorder.stream)

    def current_device(self) -> int:
        return 0

    def synchronize(self, *_: Any) -> None:
        pass

    @contextlib.contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before, self.recorder.stream = self.recorder.stream, stream.name
        try:
            yield
        finally:
            self.recorder.stream = before


class _Stream:
    def __init__(self, traffic: Traffic, name: str) -> None:
        self.traffic = traffic
        self.name = name

    def wait_stream(self, other: _Stream) -> None:
        self.traffic.wait_for_stream(self.name, other.name)

    def wait_event(self, event: _Event) -> None:
        self.traffic.wait(self.name, event.handle)

    def record_event(self) -> _Event:
        return _Event(self.traffic).record(self)

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and other.name == self.name


class _Event:
    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.handle: int | None = None

    def record(self, stream: _Stream | None = None) -> _Event:
        self.handle = self.traffic.last_on((stream or self.traffic.current_stream()).name)
        return self


@dataclass(frozen=True)
class Sharding:
    """How the weights of `setting` are sharded, and between which devices."""

    setting: TrainSetting
    mesh: DeviceMesh
    rank: int

    def shard(self, module: nn.Module, blocks: list[nn.Module]) -> tuple[str, ...]:
        """Shards each of `blocks`, and what is left of `module`; says what was done."""
        inside = {id(p) for block in blocks for p in block.parameters()}
        own = sum(p.numel() for p in module.parameters() if id(p) not in inside)
        shard_in_place(module, blocks, self.setting, self.mesh)
        return sharding_notes(self.setting, len(blocks), own, self.rank)

    def as_spread(self, module: nn.Module) -> Sharded:
        return Sharded(module)

    @contextlib.contextmanager
    def streams(self, recorder: Recorder) -> Iterator[None]:
        """Within, FSDP2 runs on streams that `recorder` knows, and frees what it hears of."""
        traffic = Traffic(recorder, self.setting)
        recorder.on_collective, recorder.on_wait = traffic.send, traffic.wait_for_last
        resize = torch.UntypedStorage.resize_

        def heard(storage: torch.UntypedStorage, size: int) -> Any:
            done = resize(storage, size)
            recorder.resized(storage)
            return done

        def handle(*_: Any) -> Traffic:
            return traffic

        with contextlib.ExitStack() as stack:
            for asking in _ASKING:
                stack.enter_context(mock.patch.object(asking, "_get_device_handle", handle))
            stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", heard))
            # A fake storage has no address, and each uneven shard would be padded once more.
            stack.enter_context(mock.patch.object(FSDPParam, "reset_sharded_param"))
            stack.enter_context(_shapes_unheard(recorder))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* a view tensor")
            yield


@contextlib.contextmanager
def _shapes_unheard(recorder: Recorder) -> Iterator[None]:
    """The first time that a DTensor meets an operation, it runs it on fake tensors of the whole
    shape, to learn the result's: nothing that a device would do."""
    learn = ShardingPropagator._propagate_tensor_meta_non_cached

    def unheard(propagator: Any, *args: Any) -> Any:
        before, recorder.is_paused = recorder.is_paused, True
        try:
            return learn(propagator, *args)
        finally:
            recorder.is_paused = before

    with mock.patch.object(ShardingPropagator, learn.__name__, unheard):
        yield


@contextlib.contextmanager
def fake_world(setting: TrainSetting, rank: int) -> Iterator[Sharding]:
    """Within, this process is `rank` of the setting's devices, and the only one of them that there
    is. Raises UnsupportedError where it belongs to a process group already."""
    if dist.is_initialized():
        raise UnsupportedError(
            "a sharded step is traced under a process group of its own, and this process belongs "
            "to one already.",
            "Estimate before torch.distributed is initialized, or in another process.",
        )
    world_size = setting.world_size
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield Sharding(setting, make_mesh(setting, "cpu"), rank)
    finally:
        dist.destroy_process_group()
