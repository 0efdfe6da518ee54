"""One process as one rank of many: torch's own NCCL group over the emulated NCCL, which waits for
no other rank; and what the rank hands over, and where what is computed waits for it.

torch's NCCL holds what was sent until its watchdog, which looks every 100 ms, sees that it was
summed, and then until the next collective. On a card steps are longer than that; here one takes
20 ms, or any time on a busy host. So the watchdog sees nothing within a step, and all between two.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import HashStore

from planner.core.schema import TrainSetting
from planner.core.schema.setting import SHARDED, Collective, Group
from planner.ledger.ledger import Awaited, Category, Event, Sent
from planner.recording.costs import tensors_in
from planner.step.ranks import sharding_notes

# FSDP2's streams (`FSDPCommContext.lazy_init`), and what lies in their pools of memory.
STREAMS: Mapping[str, Category] = {
    "all_gather_copy_in": "parameters", "all_gather": "parameters",
    "reduce_scatter": "gradients", "all_reduce": "gradients",
}  # fmt: skip
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


def steps_until_steady(setting: TrainSetting) -> int:
    """How many optimizer steps there are until one repeats the one before: DDP rebuilds its buckets
    after the first, and the step after still holds the old."""
    return 3 if setting.parallelism == "ddp" else 2


def join_alone(setting: TrainSetting) -> None:
    """Makes this process the first rank of the world of `setting`."""
    distributed.init_process_group(
        "nccl", store=HashStore(), rank=0, world_size=setting.world_size,
        timeout=timedelta(days=1),  # however long a step is in which nothing is seen to be done
    )  # fmt: skip
    _hold_watchdog(True)


def let_go() -> None:
    """What NCCL holds of the steps before is seen to be done, as where steps are long."""
    if distributed.is_available() and distributed.is_initialized():
        _hold_watchdog(False)
        distributed.group.WORLD._wait_for_pending_works()  # type: ignore[union-attr]
        _hold_watchdog(True)


def _hold_watchdog(is_held: bool) -> None:
    ctypes.CDLL("libcuda.so.1").emulated_hold_watchdog(ctypes.c_bool(is_held))


def stream_names(module: nn.Module, setting: TrainSetting) -> dict[int, str]:
    """Those that FSDP2 runs `module` on, by the addresses that the allocator's history has."""
    if setting.parallelism not in SHARDED:
        return {}
    root: Any = module
    context = root._get_fsdp_state()._comm_ctx
    return {getattr(context, f"{name}_stream").cuda_stream: name for name in STREAMS}


def whole_gradients(module: nn.Module, setting: TrainSetting) -> Iterator[Tensor]:
    """Those that FSDP2 keeps unsharded until a later micro-batch sums them."""
    for unit in _units(module) if setting.parallelism in SHARDED else ():
        group = unit._get_fsdp_state()._fsdp_param_group
        for weight in group.fsdp_params if group is not None else ():
            kept = weight.unsharded_accumulated_grad
            whole = getattr(weight, "_unsharded_param", None)
            yield from (t for t in (kept, getattr(whole, "grad", None)) if t is not None)


def world_notes(module: nn.Module, setting: TrainSetting) -> Iterator[str]:
    """How weights or gradients are spread, in words."""
    if setting.parallelism in SHARDED:
        _, *blocks = _units(module)
        inside = {id(p) for block in blocks for p in block.parameters()}
        own = sum(p.numel() for p in module.parameters() if id(p) not in inside)
        yield from sharding_notes(setting, len(blocks), own, distributed.get_rank())


def _units(module: nn.Module) -> list[Any]:
    """What FSDP2 shards each for itself, the root first."""
    from torch.distributed.fsdp import FSDPModule

    return [part for part in module.modules() if isinstance(part, FSDPModule)]


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
