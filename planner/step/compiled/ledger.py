"""The ledger of a compiled step: model and setting in, the events of two optimizer steps out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from planner.ledger import Ledger
from planner.schema import SwinConfig, TrainSetting
from planner.schema.setting import GRAPH_MODES
from planner.step.compiled.graph import Graph, Value, between
from planner.step.compiled.module import CompiledGraph, CompiledModule, compile_graph
from planner.step.compiled.recording import record_graph
from planner.step.nn import Module
from planner.step.tensor import Device
from planner.step.training import record_training

Build = Callable[[Device], Module]


@dataclass
class CompiledRecorder:
    """Ledgers of one compiled model and setting at any batch.

    The graph is traced at two batches, its shapes at others lie on the line through both (at batch
    1 it is traced by itself). The partition is made anew at each: what is cheapest to save may
    depend on the batch.
    """

    build: Build
    model: SwinConfig
    setting: TrainSetting
    graphs: dict[int, tuple[Graph, list[Value | None]]] = field(default_factory=dict)
    ledgers: dict[int, Ledger] = field(default_factory=dict)

    def ledger(self, batch_size: int) -> Ledger:
        known = self.ledgers.get(batch_size)
        if known is None:
            known = self.ledgers[batch_size] = self._record(batch_size)
        return known

    def compiled(self, batch_size: int) -> CompiledGraph:
        """The partitioned graph and its kernels at a batch."""
        if batch_size < 2:
            return compile_graph(*self._graph(batch_size))
        (first, primals), (second, _) = self._graph(2), self._graph(3)
        return compile_graph(*between(first, second, batch_size - 2, primals))

    def _record(self, batch_size: int) -> Ledger:
        compiled = self.compiled(batch_size)
        setting = self.setting.model_copy(update={"batch_size": batch_size})
        is_graphed = setting.compile in GRAPH_MODES

        def build(device: Device) -> Module:
            return CompiledModule(self.build(device), compiled, is_graphed)

        ledger = record_training(build, self.model, setting)
        pooled = compiled.saved_bytes() if is_graphed else 0
        return replace(ledger, notes=notes_for(is_graphed), pooled_saved_bytes=pooled)

    def _graph(self, batch_size: int) -> tuple[Graph, list[Value | None]]:
        known = self.graphs.get(batch_size)
        if known is None:
            dtype = "bfloat16" if self.setting.precision == "pure-bf16" else "float32"
            shape = (batch_size, self.model.in_channels, *self.model.image_size)
            known = self.graphs[batch_size] = record_graph(
                self.build, (shape, dtype), self.setting.autocast_dtype, dtype
            )
        return known


def notes_for(is_graphed: bool) -> tuple[str, ...]:
    """What a compiled ledger rests on."""
    notes = [
        "the model compiled as one graph, its saved tensors by torch 2.13's min-cut partitioner, "
        "its kernels fused in the graph's order; loss and optimizer eager"
    ]
    if is_graphed:
        notes.append(
            "CUDA graphs hold a pool of their own at its high-water mark, through the optimizer too"
        )
    return tuple(notes)
