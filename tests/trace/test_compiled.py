"""A compiled step traced: what it saves beside torch's partition, its ledger beside the eager one.

Shown on torch 2.13.0. Dynamo, AOTAutograd, Inductor's passes over the joint graph and the min-cut
partitioner run on the real module under CUDA's rules; the oracle of what is saved is the forward
that they make, read without the code that makes the ledger.
"""

from __future__ import annotations

import operator
from collections import Counter
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from planner.core.errors import PlannerError
from planner.core.schema import FactoryModel, SwinConfig, TrainSetting
from planner.ledger.ledger import Allocated, Freed, Ledger, Marked, Tagged
from planner.libraries.registry import find_library
from planner.memory.compiled import EXTERN_PREFIX, FUSED_PREFIX
from planner.step.training import record_training
from planner.trace.compiled import partition_compiled
from planner.trace.ledger import trace_estimate
from tests.building import build_real, on_shapes
from tests.libraries.steps import Changes

TINY: dict[str, Any] = {
    "image_size": (56, 56), "depths": (2, 2), "num_heads": (3, 6), "embed_dim": 96,
    "num_classes": 10, "window_size": 7, "drop_path_rate": 0.0,
}  # fmt: skip
ONE_STAGE: Changes = {"depths": (2,), "num_heads": (3,)}  # what Dynamo takes time for is blocks


def tiny(library: str, **changes: Any) -> SwinConfig:
    if library != "native" and find_spec(library) is None:
        pytest.skip(f"not installed: {library}")
    return SwinConfig(library=library, **{**TINY, **changes})


def setting_for(config: SwinConfig, **changes: Any) -> TrainSetting:
    setting = TrainSetting(**{"batch_size": 2, "compile": "default", **changes})
    return find_library(config.library).resolve(config, setting)


@cache
def ledger_of(config: SwinConfig, setting: TrainSetting) -> Ledger:
    return trace_estimate(config, setting)


def eager_ledger_of(config: SwinConfig, setting: TrainSetting) -> Ledger:
    return record_training(on_shapes(config, setting), config, setting)


def is_of_the_graph(name: str) -> bool:
    return name.startswith((FUSED_PREFIX, EXTERN_PREFIX))


def saved_by_torch(config: SwinConfig, setting: TrainSetting) -> int:
    """Bytes of the intermediates that forward returns for backward, each storage once."""
    found = partition_compiled(lambda: build_real(config, setting), config, setting)
    (output,) = found.forward.find_nodes(op="output")
    saved = {
        base_of(node) for node in output.args[0][found.num_outputs :] if isinstance(node, fx.Node)
    }
    values = [node.meta["val"] for node in saved if node.op != "placeholder"]
    assert all(isinstance(value, Tensor) for value in values)
    on_device = [v for v in values if isinstance(v.numel(), int)]  # the generator's state is not
    return sum(value.numel() * value.element_size() for value in on_device)


def base_of(node: fx.Node) -> fx.Node:
    """What a view is of, by torch's own schemas; of a part of a tuple of views, what that is of."""
    source = node.all_input_nodes[0] if node.target is operator.getitem else node
    while isinstance(source.target, torch._ops.OpOverload) and source.target.is_view:
        (node,) = source.all_input_nodes
        source = node.all_input_nodes[0] if node.target is operator.getitem else node
    return node


def saved_in(ledger: Ledger) -> int:
    """Bytes of the graph's storages that are alive as the last forward ends."""
    return sum(alive_after(ledger, "forward", of_the_graph=True))


def alive_after(ledger: Ledger, phase: str, of_the_graph: bool = False) -> list[int]:
    """Sizes of what is alive at the end of the last `phase`."""
    alive: dict[int, int] = {}
    found: list[int] = []
    for event in ledger.events:
        if isinstance(event, Allocated):
            assert event.storage not in alive
            if not of_the_graph or is_of_the_graph(event.label):
                alive[event.storage] = event.num_bytes
        elif isinstance(event, Freed):
            alive.pop(event.storage, None)
        elif isinstance(event, Marked) and event.phase == phase:
            found = list(alive.values())
    return found


@pytest.mark.compiler
def test_saves_what_torchs_partition_saves() -> None:
    config = tiny("native", **ONE_STAGE)
    setting = setting_for(config)
    assert saved_in(ledger_of(config, setting)) == saved_by_torch(config, setting) > 0


@pytest.mark.compiler
def test_saves_what_torchs_partition_of_checkpointed_blocks_saves() -> None:
    config = tiny("timm", **ONE_STAGE)
    setting = setting_for(config, precision="fp32", checkpointing="blocks")
    assert saved_in(ledger_of(config, setting)) == saved_by_torch(config, setting) > 0


def peak_of_the_graph(ledger: Ledger) -> int:
    """Most bytes of the graph's own storages alive at once."""
    alive: dict[int, int] = {}
    peak = 0
    for event in ledger.events:
        if isinstance(event, Allocated) and is_of_the_graph(event.label):
            alive[event.storage] = event.num_bytes
            peak = max(peak, sum(alive.values()))
        elif isinstance(event, Freed):
            alive.pop(event.storage, None)
    return peak


def test_the_step_around_the_graph_is_the_eager_one() -> None:
    """Of a compiled step nothing stays but gradients, whatever was alive within it; and it computes
    the same products."""
    config = tiny("native", **ONE_STAGE)
    setting = setting_for(config)
    compiled, eager = ledger_of(config, setting), eager_ledger_of(config, setting)
    for phase in ("backward", "optimizer", "zero_grad"):
        assert Counter(alive_after(compiled, phase)) == Counter(alive_after(eager, phase))
    assert sum(alive_after(compiled, "forward")) < sum(alive_after(eager, "forward"))

    def work(ledger: Ledger) -> tuple[int, int]:
        """FLOPs of products, and bytes that all else moves."""
        within = [op for phase, op in ledger.operations() if phase in ("forward", "backward")]
        products = [op for op in within if op.kind in ("matmul", "attention")]
        return (
            sum(op.flops for op in products),
            sum(op.num_bytes for op in within if op.kind in ("pointwise", "reduction", "copy")),
        )

    (flops, moved), (eager_flops, eager_moved) = work(compiled), work(eager)
    assert flops == eager_flops
    assert moved < 0.7 * eager_moved
    paths = {op.path for _, op in compiled.operations() if is_of_the_graph(op.name)}
    names = {name for name, _ in build_real(config, setting).named_modules()}
    assert {"layers.0.blocks.1.mlp.fc1", "head"} <= paths <= names
    tags = Counter(e.category for e in compiled.events if isinstance(e, Tagged))
    assert min(tags["activations"], tags["gradients"]) > 20


@pytest.mark.compiler
def test_graphs_keep_their_pool_through_the_optimizer() -> None:
    config = tiny("native", **ONE_STAGE)
    default = ledger_of(config, setting_for(config, batch_size=40))
    graphed = ledger_of(config, setting_for(config, batch_size=40, compile="reduce-overhead"))
    ends = {p: sum(alive_after(graphed, p)) for p in ("backward", "optimizer", "zero_grad")}
    assert ends["optimizer"] > sum(alive_after(default, "optimizer"))
    assert ends["optimizer"] == ends["zero_grad"] == ends["backward"]
    assert graphed.pooled_saved_bytes == pytest.approx(saved_in(default), rel=1e-3)
    pools = [e for e in graphed.events if isinstance(e, Allocated) and "pool" in e.label]
    assert len(pools) == 3
    assert sum(p.num_bytes for p in pools) >= peak_of_the_graph(default)
    assert not saved_in(graphed)


class Reading(nn.Module):
    """Breaks into two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3 * 64, 10)

    def forward(self, images: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        logits: Tensor = self.head(images.flatten(1))
        return logits


OWN = FactoryModel(factory="own:build", image_size=(8, 8), num_classes=10)


def test_a_module_that_is_several_graphs_is_said_to_be() -> None:
    with pytest.raises(PlannerError, match="own:build cannot be compiled as one graph"):
        trace_estimate(OWN, TrainSetting(batch_size=4, compile="default"), Reading)
