"""What `torch.compile` would do with a real module on CUDA, up to the partition of its graph.

Dynamo, AOTAutograd, Inductor's passes over the joint graph and the min-cut partitioner run for
real, on CPU tensors under CUDA's rules (`cuda_rules`); nothing is computed or compiled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch._functorch.config
from torch import fx, nn

from planner.core.errors import PlannerError, UnsupportedError
from planner.core.schema import Model, TrainSetting
from planner.libraries.building import Build
from planner.trace.building import build_task
from planner.trace.cuda_rules import as_on_cuda

Source = str | int | None
"""What an input of a graph is: a parameter's name, the number of a tensor among the arguments that
the graph is called with, or None for anything else."""


@dataclass(frozen=True)
class Partition:
    """The two halves that torch makes of a compiled module's graph.

    `num_outputs` are the module's own outputs, first among those of `forward`; the others are saved
    for backward: inputs (parameters, images) as they are, and intermediates. `sources` are of the
    inputs of `forward`.
    """

    forward: fx.Graph
    backward: fx.Graph
    num_outputs: int
    sources: tuple[Source, ...]


class NoBackwardError(UnsupportedError):
    """Nothing in the graph is trained."""


class _Captured(BaseException):  # no Exception: nothing on the way may take it for a failure
    """The partition is known; there is nothing to compile."""


class _Backend:
    """A backend of `torch.compile` that keeps the partition of the first graph and ends there.

    `sources` are known tensors by their id."""

    def __init__(self, sources: Mapping[int, Source]) -> None:
        self.known = sources
        self.sources: tuple[Source, ...] = ()
        self.found: Partition | None = None

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        from torch._dynamo.backends.common import aot_autograd
        from torch._inductor.decomposition import select_decomp_table

        import_module("torch._inductor.lowering")  # decompositions use it, and do not import it
        self.sources = tuple([self.known.get(id(value)) for value in inputs])
        compiler = aot_autograd(
            fw_compiler=_without_backward,
            partition_fn=self._partition,
            decompositions=select_decomp_table(),
        )
        return compiler(graph, inputs)

    def _partition(self, joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        from torch._guards import detect_fake_mode
        from torch._inductor.compile_fx import partition_fn
        from torch._inductor.virtualized import V

        with V.set_fake_mode(detect_fake_mode(inputs)):
            forward, backward = partition_fn(joint, inputs, **kwargs)
        num_outputs = kwargs["num_fwd_outputs"]
        self.found = Partition(forward.graph, backward.graph, num_outputs, self.sources)
        raise _Captured


def _without_backward(*_: Any) -> Any:
    raise _Captured


def partition_compiled(build: Build, model: Model, setting: TrainSetting) -> Partition:
    """Compiles the module that `build` makes as far as its partition, at the setting's batch.

    Raises PlannerError where Dynamo does not take the model as one graph.
    """
    task, module, _ = build_task(build, model, setting)
    batch = task.batch(setting.batch_size, torch.device("cpu"))
    sources: dict[int, Source] = {id(p): name for name, p in module.named_parameters()}
    return partition_of(
        module, lambda compiled: task.loss(compiled, batch), sources, model.title, setting
    )


def partition_of(
    module: nn.Module,
    call: Callable[[Any], object],
    sources: Mapping[int, Source],
    title: str,
    setting: TrainSetting,
) -> Partition:
    """Compiles `module`, which `call` is to call, as far as its partition; `sources` are what is
    known of its inputs, by id. Raises PlannerError where Dynamo does not take it as one graph."""
    backend = _Backend(sources)
    budget = setting.activation_memory_budget
    torch._dynamo.reset()
    try:
        with (
            as_on_cuda(),
            torch._functorch.config.patch(activation_memory_budget=budget),
            contextlib.suppress(_Captured),
            autocast(setting),
        ):
            call(torch.compile(module, backend=backend, dynamic=False, fullgraph=True))
    except torch._dynamo.exc.TorchDynamoException as error:
        cause = getattr(error, "inner_exception", None)
        what = "as one graph: " if cause is None else f"by torch ({type(cause).__name__}): "
        said = str(cause or error).strip().partition("\n")[0]
        raise PlannerError(
            f"{title} cannot be compiled {what}{said}",
            "Estimate it with --compile off, or measure with 'planner tune'.",
        ) from error
    finally:
        torch._dynamo.reset()
    if backend.found is None:
        raise NoBackwardError(f"{title} has no graph that needs a backward.", "Do not compile it.")
    return backend.found


@contextlib.contextmanager
def autocast(setting: TrainSetting) -> Iterator[None]:
    name = setting.autocast_dtype
    if name is None:
        yield
        return
    with torch.autocast("cpu", dtype=getattr(torch, name)):
        yield
