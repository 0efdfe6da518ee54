"""`DistributedDataParallel` of a real module on fake tensors, by the rules of `step.reducer`.

torch's own reads values of its bookkeeping, which fake tensors have none of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from planner.core.collectives import Collective
from planner.core.schema import TrainSetting
from planner.step.broadcasts import States
from planner.step.reducer import Reducer, Weight
from planner.trace.recorder import Recorder
from planner.trace.trees import tensors_in
from planner.training.tasks.trees import map_tensors


class LeafGradients:
    """The gradients of `parameters` (`reducer.Gradients`)."""

    def __init__(self, recorder: Recorder, parameters: list[nn.Parameter]) -> None:
        self.recorder = recorder
        self.parameters = parameters

    def make(self, numel: int, dtype: str, label: str) -> Tensor:
        with self.recorder.labelled(label):
            return torch.empty(numel, dtype=getattr(torch, dtype))

    def keep(self, flat: Tensor) -> None:
        self.recorder.tag([flat], "gradients")

    def compute(self, name: str, dtype: str, num_bytes: int) -> None:
        self.recorder.compute(name, dtype, num_bytes)

    def is_there(self, index: int) -> bool:
        return self.parameters[index].grad is not None

    def is_in(self, index: int, flat: Tensor) -> bool:
        gradient = self.parameters[index].grad
        return gradient is not None and _address(gradient) == _address(flat)

    def put_in(self, index: int, flat: Tensor, offset: int) -> None:
        parameter = self.parameters[index]
        with self.recorder.labelled("aten.as_strided"), torch.no_grad():
            parameter.grad = flat.as_strided(parameter.shape, parameter.stride(), offset)

    def send(self, collective: Collective, num_bytes: int, dtype: str, *, follows: bool) -> int:
        return self.recorder.send(collective, num_bytes, dtype, "world", follows=follows)

    def wait(self, handle: int) -> None:
        self.recorder.wait(handle)


class DataParallel(nn.Module):
    """`module` and its reducer, called in the module's place. Not to be held by what it hooks: its
    lifetime is its owner's."""

    def __init__(self, recorder: Recorder, module: nn.Module, setting: TrainSetting) -> None:
        super().__init__()
        self.module = module
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        trained = [p for _, p in named]
        gradients = LeafGradients(recorder, trained)
        self.trained = trained
        self.states = States(
            gradients, _weights(module.named_buffers()), setting.ddp_broadcast_buffers
        )
        self.states.at_build(_weights(module.named_parameters()))
        self.reducer = Reducer(gradients, _weights(named), setting)
        for index, parameter in enumerate(trained):
            parameter.register_post_accumulate_grad_hook(partial(_take, ref(self), index))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """`DistributedDataParallel.forward`."""
        if torch.is_grad_enabled():
            self.reducer.begin()
        self.states.at_forward()
        output = self.module(*inputs, **kwargs)
        self.states.is_stale = torch.is_grad_enabled() and self.reducer.syncs
        if self.states.is_stale:
            self.reducer.expect(self._unused(output) if self.reducer.is_dynamic else ())
        return map_tensors(output, _through_sink) if self.reducer.passes_through_sink else output

    @contextmanager
    def micro_batch(self, sums_gradients: bool) -> Iterator[None]:
        """`no_sync`, where it does not sum."""
        self.reducer.syncs = sums_gradients
        yield
        self.reducer.syncs = True

    def take(self, index: int) -> None:
        """A parameter's gradient is ready; the first of a backward sees to its end. The engine
        holds what came in until its hooks have run, as is done here."""
        held = self.trained[index].grad
        if self.reducer.is_expecting and not self.reducer.is_begun:
            Variable._execution_engine.queue_callback(self.reducer.finish)
        self.reducer.ready(index)
        del held

    def _unused(self, output: Any) -> list[int]:
        """`search_unused_parameters`: those that the graph of `output` does not lead to."""
        waiting = [t.grad_fn for t in tensors_in(output) if t.grad_fn is not None]
        seen = set(waiting)
        leaves = set()
        while waiting:
            node = waiting.pop()
            leaves.add(id(getattr(node, "variable", None)))
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    waiting.append(following)
        return [index for index, p in enumerate(self.trained) if id(p) not in leaves]


def _take(held: ref[DataParallel], index: int, _: Tensor) -> None:
    parallel = held()
    if parallel is not None:
        parallel.take(index)


def _through_sink(output: Tensor) -> Tensor:
    """What has no history stays itself."""
    copied = output.clone()
    return output if output.grad_fn is None else copied


def _weights(named: Iterable[tuple[str, Tensor]]) -> list[Weight]:
    return [
        Weight(t.numel(), str(t.dtype).removeprefix("torch."), t.nbytes, name) for name, t in named
    ]


def _address(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
