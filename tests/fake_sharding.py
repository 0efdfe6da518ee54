"""One rank of FSDP2 as torch itself runs it, on fake tensors under the fake process group.

What a step on shapes is laid beside: which storages come and go, in which order and on which CUDA
stream. FSDP2 takes its streams from a device's handle and frees weights by resizing their storages;
here a handle of our own names the stream that is current, and resizing is heard.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # else the first step imports it, and leaves frames and their tensors alive
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

from planner.ledger import Allocated, Event, Freed
from planner.libraries.registry import find_library
from planner.parallel.fully_sharded import precision_policy
from planner.schema import ResolvedSetting, SwinConfig
from planner.step.frames import plain_calls
from planner.tasks.trees import tensors_of
from planner.trace.building import build_task, make_fake
from planner.trace.cuda_rules import as_on_cuda
from planner.trace.faults import quiet_fakes
from planner.trace.recorder import Recorder
from planner.trace.run import add_module, collector_off, training_as_on_cuda, watch_optimizer
from planner.training import Training

STREAMS = ("all_gather_copy_in", "all_gather", "reduce_scatter", "all_reduce")
_HANDLES = ("_fsdp_param_group", "_fsdp_collectives", "_fsdp_state", "_fsdp_init")


class _Stream:
    def __init__(self, name: str) -> None:
        self.name = name

    def wait_stream(self, other: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def record_event(self, event: object = None) -> _Event:
        return _Event()


class _Event:
    def record(self, *_: object) -> _Event:
        return self

    def wait(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...


class _Handle:
    """What FSDP2 asks of `torch.cuda`. Streams are named in the order in which FSDP2 makes them."""

    Event = _Event

    def __init__(self) -> None:
        self.running = [_Stream("")]
        self._names = iter(STREAMS)

    def Stream(self, **_: object) -> _Stream:  # noqa: N802 (torch's name)
        return _Stream(next(self._names))

    def current_stream(self, *_: object) -> _Stream:
        return self.running[-1]

    @contextlib.contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        self.running.append(stream)
        try:
            yield
        finally:
            self.running.pop()


class _Recorder(Recorder):
    """Knows the stream that a storage was made on, and hears of storages that are resized."""

    def __init__(self, handle: _Handle) -> None:
        super().__init__()
        self._handle = handle
        self.is_propagating = False  # sizes of a DTensor's results: no device runs these

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.is_propagating:
            return func(*args, **kwargs or {})
        wraps = any(is_traceable_wrapper_subclass_type(kind) for kind in types)
        if func is torch.ops._c10d_functional.wait_tensor.default and not wraps:
            return args[0]  # as a real one does: only a fake one makes a new tensor
        return super().__torch_dispatch__(func, types, args, kwargs)

    def add(self, tensor: Tensor, label: str, path: str = "") -> None:
        before = len(self.events)
        super().add(tensor, label, path)
        if len(self.events) > before:
            self._name_stream()

    def _name_stream(self) -> None:
        event = self.events[-1]
        assert isinstance(event, Allocated)
        self.events[-1] = event._replace(stream=self._handle.current_stream().name)

    def resized(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        known = self._alive.pop(address, None)
        if known is not None:
            self.events.append(Freed(known[0]))
        if storage.nbytes():
            number, self._next = self._next, self._next + 1
            ref = weakref.ref(storage, partial(self._free, address))
            self._alive[address] = (number, ref)
            self.events.append(Allocated(number, storage.nbytes(), "resize_"))
            self._name_stream()


@contextlib.contextmanager
def fake_group(world_size: int, rank: int) -> Iterator[None]:
    """This process as `rank` of a group whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _handled_by(handle: _Handle) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in _HANDLES:
            module = f"torch.distributed.fsdp._fully_shard.{name}._get_device_handle"
            stack.enter_context(mock.patch(module, return_value=handle))
        yield


@contextlib.contextmanager
def _heard_by(recorder: _Recorder) -> Iterator[None]:
    resize = torch.UntypedStorage.resize_
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def propagated(*args: Any) -> Any:
        recorder.is_propagating = True
        try:
            return propagate(*args)
        finally:
            recorder.is_propagating = False

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        recorder.resized(storage)
        return result

    with (
        mock.patch.object(torch.UntypedStorage, "resize_", resize_),
        # A fake storage has no address, so that each uneven shard would be padded once more.
        mock.patch.object(FSDPParam, "reset_sharded_param"),
        mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagated),
    ):
        yield


def make_mesh(setting: ResolvedSetting) -> DeviceMesh:
    """All devices; of hsdp, a row of those that share one set of shards for each copy."""
    shard_size = setting.shard_size
    if setting.parallelism == "hsdp":
        shape = (setting.world_size // shard_size, shard_size)
        return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (shard_size,))


def shard(
    module: nn.Module, config: SwinConfig, setting: ResolvedSetting, mesh: DeviceMesh
) -> nn.Module:
    """`fully_shard` of each block, then of the model."""
    policy = precision_policy(setting)
    spec = find_library(config.library)
    reshard = None if setting.fsdp_reshard else False
    for block in module.modules():
        if not {kind.__name__ for kind in type(block).__mro__} & {*spec.block_classes}:
            continue
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    return module


class _Training(Training):
    """Gradients cross between devices in the last micro-batch of a step, or in every one."""

    num_micro = 0

    def micro_step(self, on_phase: Any) -> None:
        self.num_micro += 1
        is_last = self.num_micro % self.setting.accumulate == 0
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(is_last or self.setting.gradient_sync == "every")
        super().micro_step(on_phase)


def trace_sharded(config: SwinConfig, setting: ResolvedSetting, rank: int = 0) -> list[Event]:
    """The events of two optimizer steps of one rank, after those of building it."""
    spec = find_library(config.library)
    with fake_group(setting.world_size, rank):
        return _trace(partial(spec.build, config, setting), config, setting)


def _trace(build: Any, config: SwinConfig, setting: ResolvedSetting) -> list[Event]:
    task, module, _ = build_task(build, config, setting)
    handle = _Handle()
    with (
        plain_calls(),
        collector_off(),
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        _handled_by(handle),
    ):
        recorder = _Recorder(handle)
        make_fake(module, mode, recorder.values.learn)
        add_module(recorder, module)
        cuda = training_as_on_cuda(recorder)
        with as_on_cuda(), quiet_fakes(), _heard_by(recorder), recorder, cuda:
            shard(module, config, setting, make_mesh(setting))
            _train(recorder, module, task, setting)
        return list(recorder.events)


def _train(recorder: Recorder, module: nn.Module, task: Any, setting: ResolvedSetting) -> None:
    batch = task.batch(setting.batch_size, torch.device("cpu"))
    recorder.note(list(tensors_of(batch)), "batch")
    training = _Training(module, setting, task, batch)
    watch_optimizer(recorder, training)
    recorder.mark("build", 0)
    for step in range(2):
        training.step(partial(_mark, recorder, step))
    if setting.validation_batch_size:
        training.validate(partial(_mark, recorder, 1), None)


def _mark(recorder: Recorder, step: int, phase: str) -> None:
    recorder.mark(phase, step)
