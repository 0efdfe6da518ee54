"""The ledger of a compiled step from the real module: traced graph, transcribed partition."""

from __future__ import annotations

from dataclasses import replace

import torch

from planner.errors import PlannerError, UnsupportedError
from planner.ledger import Ledger
from planner.libraries.building import Build
from planner.schema import Model, TrainSetting
from planner.schema.setting import GRAPH_MODES
from planner.step.compiled.graph import Graph
from planner.step.compiled.ledger import notes_for
from planner.step.compiled.module import CompiledModule, compile_graph
from planner.step.nn import Module, buffer
from planner.step.tensor import Device, Parameter
from planner.step.training import record_training
from planner.trace.partition import partition_compiled


class _Leaves(Module):
    """The parameters and buffers of a traced graph, on shapes."""

    def __init__(self, device: Device, graph: Graph) -> None:
        self.trained: list[Parameter] = []
        self.others = []
        for primal, gradient in zip(graph.primals(), graph.gradients, strict=True):
            shape = primal.shape or ()
            if gradient is not None and primal.dtype == device.float_dtype:
                self.trained.append(Parameter(device, shape))
            elif gradient is not None:
                raise UnsupportedError(
                    f"a parameter in {primal.dtype} among others in {device.float_dtype} is not "
                    "followed in a compiled step.",
                    "Estimate with --compile off, or measure with 'planner tune'.",
                )
            elif primal.is_static:
                self.others.append(buffer(device, shape, primal.dtype))

    def parameters(self):  # type: ignore[no-untyped-def]
        return iter(self.trained)


def trace_compiled(model: Model, setting: TrainSetting, build: Build) -> Ledger:
    """Two optimizer steps of the module that `build` makes, compiled: its joint graph is torch's
    own, what is saved and fused is as on shapes. Parameters that the graph does not use are left
    out. Raises PlannerError where the module does not compile as one graph.
    """
    try:
        parts = partition_compiled(build, model, setting)
    except torch._dynamo.exc.TorchDynamoException as error:
        said = str(error).strip().partition("\n")[0]
        raise PlannerError(
            f"{model.title} cannot be compiled as one graph: {said}",
            "Estimate it with --compile off, or measure with 'planner tune'.",
        ) from error
    graph = parts.graph()
    pairs = zip(graph.primals(), graph.gradients, strict=True)
    compiled = compile_graph(graph, [p for p, gradient in pairs if gradient is not None])
    is_graphed = setting.compile in GRAPH_MODES

    def on_shapes(device: Device) -> Module:
        return CompiledModule(_Leaves(device, graph), compiled, is_graphed)

    ledger = record_training(on_shapes, model, setting)  # type: ignore[arg-type]
    return replace(
        ledger,
        num_parameters=parts.num_parameters,
        notes=(*notes_for(is_graphed), f"its graph traced with torch {torch.__version__}"),
        pooled_saved_bytes=compiled.saved_bytes() if is_graphed else 0,
    )
