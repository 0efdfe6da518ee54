"""The compiled parts of a model, whole or block by block: torch's partition of each, as kernels.

A block's inputs are known from one forward on fake tensors. Like blocks are partitioned once; torch
compiles one graph more for each float in which they differ (the rate of stochastic depth).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map

from planner.core.schema import Model, TrainSetting
from planner.libraries.building import Build
from planner.trace.building import build_task, given_batch, make_fake
from planner.trace.compiled.module import CompiledGraph, plan_kernels, run_compiled
from planner.trace.compiled.partition import (
    NoBackwardError,
    Source,
    autocast,
    partition_compiled,
    partition_of,
)
from planner.trace.cuda_rules import as_on_cuda
from planner.trace.faults import quiet_fakes
from planner.trace.recorder import Recorder
from planner.trace.trees import tensors_in
from planner.training.tasks.compiling import blocks_to_compile
from planner.training.tasks.trees import map_tensors


@dataclass(frozen=True)
class Like:
    """What a graph depends on of a tensor that it is given."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Like:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)

    def empty(self) -> Tensor:
        made = torch.empty_strided(self.shape, self.strides, dtype=self.dtype)
        return made.requires_grad_(self.requires_grad)


Given = Any  # the arguments of a call, (args, kwargs), each tensor a `Like`


@dataclass(frozen=True)
class Region:
    """A module that is compiled by itself: its graphs, by what it is given."""

    graphs: Mapping[Hashable, CompiledGraph | None]

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CompiledGraph | None:
        return self.graphs[_key(_likes(args, kwargs))]


@dataclass(frozen=True)
class Regions:
    """What is compiled of a model: blocks by name, or the `whole`. `num_graphs` is how many graphs
    torch makes of it, about: of timm it may make one less, of torchvision one more (torch 2.13)."""

    of: Mapping[str, Region]
    whole: CompiledGraph | None = None
    num_graphs: int = 1

    def run_in(self, module: nn.Module) -> None:
        """From here on `module` runs these kernels in place of its code."""
        if self.whole is not None:
            whole = self.whole
            run_compiled(module, lambda args, kwargs: whole)
        for name, region in self.of.items():
            run_compiled(module.get_submodule(name), region, name)

    @property
    def notes(self) -> tuple[str, ...]:
        """About how many graphs the blocks become; nothing of a model compiled whole."""
        if self.whole is not None:
            return ()
        graphs = f"{self.num_graphs} graph{'s' if self.num_graphs > 1 else ''}"
        return (f"{len(self.of)} blocks are compiled by themselves, as about {graphs}",)


def compile_regions(build: Build, model: Model, setting: TrainSetting) -> Regions:
    """The kernels of what `setting` compiles of the module of what `build` makes, at its batch.

    Raises PlannerError where it does not compile as one graph.
    """
    if setting.compile_scope == "model":
        return Regions({}, plan_kernels(partition_compiled(build, model, setting)))
    calls = _calls(build, model, setting)
    module = build_task(build, model, setting).module
    known: dict[Hashable, CompiledGraph | None] = {}
    distinct = set()
    of: dict[str, Region] = {}
    for name, given in calls.items():
        block = module.get_submodule(name)
        graphs: dict[Hashable, CompiledGraph | None] = {}
        for key, call in given.items():
            like = (_signature(block, floats=False), key)
            if like not in known:
                known[like] = _graph(block, call, f"{model.title}, {name}", setting)
            graphs[key] = known[like]
            distinct.add((_signature(block, floats=True), key))
        of[name] = Region(graphs)
    return Regions(of, None, len(distinct))


def _graph(
    block: nn.Module, given: Given, title: str, setting: TrainSetting
) -> CompiledGraph | None:
    """None where nothing in the block is trained: what it runs is then eager's."""
    args, kwargs = tree_map(lambda leaf: leaf.empty() if isinstance(leaf, Like) else leaf, given)
    sources: dict[int, Source] = {id(p): name for name, p in block.named_parameters()}
    sources |= {id(tensor): number for number, tensor in enumerate(tensors_in((args, kwargs)))}
    try:
        found = partition_of(
            block, lambda compiled: compiled(*args, **kwargs), sources, title, setting
        )
    except NoBackwardError:
        return None
    return plan_kernels(found)


@dataclass
class _Watch:
    """Writes down what a block is called with."""

    calls: dict[Hashable, Given] = field(default_factory=dict)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = _likes(args, kwargs)
        self.calls[_key(given)] = given


def _calls(build: Build, model: Model, setting: TrainSetting) -> dict[str, dict[Hashable, Given]]:
    """What each block is called with in one forward on fake tensors, by the block's name."""
    task, module, _ = build_task(build, model, setting)
    names = {id(inner): name for name, inner in module.named_modules()}
    watches: dict[str, _Watch] = {}
    for block in blocks_to_compile(module, task, model):
        watch = watches[names[id(block)]] = _Watch()
        block.register_forward_pre_hook(watch, with_kwargs=True)
    batch = given_batch(task, setting.batch_size)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        recorder = Recorder()
        make_fake(module, mode, recorder.values.learn)
        with as_on_cuda(), quiet_fakes(), recorder:
            if batch is None:
                batch = task.batch(setting.batch_size, torch.device("cpu"))
            batch = map_tensors(batch, change=mode.from_tensor)
            with autocast(setting):
                task.loss(module, batch)
    return {name: watch.calls for name, watch in watches.items()}


def _likes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Given:
    given = (tuple(args), dict(kwargs))
    return tree_map(lambda leaf: Like.of(leaf) if isinstance(leaf, Tensor) else leaf, given)


def _key(given: Given) -> Hashable:
    leaves, structure = tree_flatten(given)
    return str(structure), tuple([leaf if _is_plain(leaf) else repr(leaf) for leaf in leaves])


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, Like | bool | int | float | str)


def _signature(block: nn.Module, floats: bool) -> Hashable:
    """What Dynamo's guards tell blocks apart by: classes, the shapes of what they own, and plain
    attributes. Without `floats`, of these only whether they are 0 or 1, which code may ask."""
    return tuple([(name, *_traits(inner, floats)) for name, inner in block.named_modules()])


def _traits(module: nn.Module, floats: bool) -> Iterator[Hashable]:
    yield type(module).__qualname__
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        yield name, None if tensor is None else Like.of(tensor)
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or not isinstance(value, bool | int | str | tuple | float):
            continue
        is_any = isinstance(value, float) and value not in (0.0, 1.0)
        yield name, "a float" if is_any and not floats else str(value)
