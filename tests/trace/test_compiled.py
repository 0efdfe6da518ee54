"""A compiled step traced: what it saves beside torch's partition, its ledger beside the eager one.

Shown on torch 2.13.0. Dynamo, AOTAutograd, Inductor's passes over the joint graph and the min-cut
partitioner run on the real module under CUDA's rules; the oracle of what is saved is the forward
that they make, read without the code that makes the ledger.
"""

from __future__ import annotations

import operator
import subprocess
import sys
from collections import Counter
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from planner.core.errors import PlannerError
from planner.core.schema import FactoryModel, SwinConfig, TrainSetting
from planner.ledger.affine import AffineLedger
from planner.ledger.ledger import Allocated, Computed, Freed, Ledger, Marked, Tagged
from planner.libraries.registry import find_library
from planner.libraries.resolve import resolve_model
from planner.memory.compiled import EXTERN_PREFIX, FUSED_PREFIX
from planner.step.training import record_training
from planner.trace.compiled import partition_compiled
from planner.trace.ledger import trace_estimate
from tests.building import build_real, on_shapes
from tests.libraries.steps import Changes, name_of, needs

TINY: dict[str, Any] = {
    "image_size": (56, 56), "depths": (2, 2), "num_heads": (3, 6), "embed_dim": 96,
    "num_classes": 10, "window_size": 7, "drop_path_rate": 0.0,
}  # fmt: skip
ONE_STAGE: Changes = {"depths": (2,), "num_heads": (3,)}  # what Dynamo takes time for is blocks
BF16: Changes = {"precision": "bf16"}
LIBRARIES = ("native", "timm", "torchvision", "transformers")


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


def assert_saves_as_torch(config: SwinConfig, setting: TrainSetting) -> None:
    assert saved_in(ledger_of(config, setting)) == saved_by_torch(config, setting) > 0


QUICK: list[tuple[str, Changes, Changes]] = [
    ("native", {}, {**BF16, "attention": "sdpa", "checkpointing": "blocks"}),
]
MORE: list[tuple[str, Changes, Changes]] = [
    (library, {"version": version}, {"precision": precision, "checkpointing": checkpointing})
    for library in LIBRARIES
    for version in (1, 2)
    for precision in ("fp32", "bf16")
    for checkpointing in ("none", "blocks")
    if not (library == "transformers" and checkpointing == "blocks")
] + [
    ("timm", {}, {"precision": "fp16"}),
    ("timm", {"drop_rate": 0.1, "attn_drop_rate": 0.1}, BF16),
    ("timm", {"image_size": (64, 48)}, BF16),
    ("transformers", {"drop_rate": 0.1, "drop_path_rate": 0.1}, {"attention": "eager"}),
    ("native", {}, {**BF16, "batch_size": 5, "checkpointing": "stages"}),
]
PUBLISHED: list[tuple[str, Changes]] = [
    ("timm:swin_base_patch4_window7_224", BF16),
    ("timm:swin_tiny_patch4_window7_224", {"precision": "fp32"}),
    ("native:swin_tiny", {**BF16, "checkpointing": "blocks"}),
    ("torchvision:swin_t", BF16),
    ("transformers:microsoft/swin-tiny-patch4-window7-224", BF16),
]


@pytest.mark.parametrize(("library", "model", "changes"), QUICK, ids=name_of)
def test_saves_what_torchs_partition_saves(library: str, model: Changes, changes: Changes) -> None:
    config = tiny(library, **{**ONE_STAGE, **model})
    assert_saves_as_torch(config, setting_for(config, **changes))


@pytest.mark.release
@pytest.mark.parametrize(("library", "model", "changes"), MORE, ids=name_of)
def test_saves_what_more_of_torchs_partitions_save(
    library: str, model: Changes, changes: Changes
) -> None:
    config = tiny(library, **model)
    assert_saves_as_torch(config, setting_for(config, **changes))


@pytest.mark.release
@needs("timm", "torchvision", "transformers")
@pytest.mark.parametrize(("name", "changes"), PUBLISHED, ids=name_of)
def test_saves_what_published_models_save(name: str, changes: Changes) -> None:
    config = resolve_model(name, {})
    assert isinstance(config, SwinConfig)
    assert_saves_as_torch(config, setting_for(config, **changes))


@pytest.mark.release
@pytest.mark.parametrize(
    ("library", "model", "changes"),
    [
        ("timm", {}, BF16),
        ("timm", {}, {"precision": "fp32"}),
        ("timm", {"version": 2}, BF16),
        ("native", {}, {**BF16, "attention": "eager"}),
        ("torchvision", {}, BF16),
        ("transformers", {}, {**BF16, "attention": "eager"}),
        ("timm", {}, {**BF16, "checkpointing": "blocks"}),
    ],
    ids=name_of,
)
def test_peaks_are_near_inductors_own_estimate(
    library: str, model: Changes, changes: Changes
) -> None:
    """What `planner.memory.compiled.TRACED` rests on. Not equal: see `inductor.py`."""
    from tests.trace.inductor import inductor_peaks

    config = tiny(library, **{**ONE_STAGE, **model})
    setting = setting_for(config, batch_size=16, **changes)
    mine, real = peak_of_the_graph(ledger_of(config, setting)), inductor_peaks(config, setting)
    print(name_of(model), mine / max(real.values()))
    assert mine == pytest.approx(max(real.values()), rel=0.06)


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


def assert_affine(config: SwinConfig, setting: TrainSetting) -> None:
    def at(batch_size: int) -> Ledger:
        return ledger_of(config, setting.model_copy(update={"batch_size": batch_size}))

    AffineLedger.through(at(2), at(3)).check(at(40))


@pytest.mark.compiler
def test_graph_at_any_batch_lies_on_the_line() -> None:
    config = tiny("native", **ONE_STAGE)
    assert_affine(config, setting_for(config))


@pytest.mark.release
@pytest.mark.parametrize("checkpointing", ["none", "blocks"])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("library", LIBRARIES)
def test_more_graphs_at_any_batch_lie_on_the_line(
    library: str, version: int, checkpointing: str
) -> None:
    if library == "transformers" and version == 1 and checkpointing == "blocks":
        pytest.skip("breaks into several graphs")
    config = tiny(library, version=version, drop_path_rate=0.1)
    assert_affine(config, setting_for(config, checkpointing=checkpointing))


@pytest.mark.parametrize(
    ("library", "checkpointing", "drop_path_rate"),
    [
        ("native", "none", 0.0),  # whose ledger other tests have made
        *(
            pytest.param(*case, 0.1, marks=pytest.mark.release)
            for case in (
                ("native", "none"),
                ("native", "blocks"),
                ("timm", "blocks"),
                ("transformers", "none"),
            )
        ),
    ],
)
def test_step_ends_as_the_eager_one(
    library: str, checkpointing: str, drop_path_rate: float
) -> None:
    """Of a compiled step nothing stays but gradients, whatever was alive within it."""
    config = tiny(library, **ONE_STAGE, drop_path_rate=drop_path_rate)
    setting = setting_for(config, checkpointing=checkpointing)
    compiled, eager = ledger_of(config, setting), eager_ledger_of(config, setting)
    for phase in ("backward", "optimizer", "zero_grad"):
        assert sum(alive_after(compiled, phase)) == sum(alive_after(eager, phase))
    if checkpointing == "none":
        assert sum(alive_after(compiled, "forward")) < sum(alive_after(eager, "forward"))


@pytest.mark.parametrize(
    "changes",
    [
        {
            "precision": "fp16",
            "memory_format": "channels_last",
            "ema": True,
            "validation_batch_size": 3,
            "accumulate": 2,
        },
        pytest.param({"precision": "pure-bf16"}, marks=pytest.mark.release),
        pytest.param(
            {"clip_grad": True, "optimizer": "sgd", "loss": "label-smoothing"},
            marks=pytest.mark.release,
        ),
        pytest.param({"frozen_stages": 1}, marks=pytest.mark.release),
        pytest.param({"lora_rank": 4}, marks=pytest.mark.release),
    ],
    ids=name_of,
)
def test_everything_around_the_graph_is_the_eager_steps(changes: Changes) -> None:
    """Only forward and backward are other kernels: the same storages outlive the step."""
    config = tiny("native", **({} if "frozen_stages" in changes else ONE_STAGE))
    setting = setting_for(config, **changes)
    eager = trace_estimate(config, setting.model_copy(update={"compile": "off"}))
    compiled = ledger_of(config, setting)
    last = "validation" if setting.validation_batch_size else "zero_grad"
    for phase in ("backward", "optimizer", last):
        assert Counter(alive_after(compiled, phase)) == Counter(alive_after(eager, phase))


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


def test_fused_kernels_move_less_than_eager_ones() -> None:
    config = tiny("native", **ONE_STAGE)
    setting = setting_for(config)

    def moved(ledger: Ledger) -> int:
        return sum(
            op.num_bytes
            for phase, op in ledger.operations()
            if phase in ("forward", "backward") and op.kind in ("pointwise", "reduction", "copy")
        )

    assert moved(ledger_of(config, setting)) < 0.7 * moved(eager_ledger_of(config, setting))


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.release)])
def test_products_are_those_of_the_eager_step(attention: str) -> None:
    config = tiny("native", **ONE_STAGE)
    setting = setting_for(config, attention=attention)

    def flops(ledger: Ledger) -> dict[str, int]:
        found: Counter[str] = Counter()
        for event in ledger.events:
            if isinstance(event, Computed) and event.kind in ("matmul", "attention"):
                found[event.kind] += event.flops
        return found

    assert flops(ledger_of(config, setting)) == flops(eager_ledger_of(config, setting))


def test_kernels_say_which_module_they_are_from() -> None:
    config = tiny("native", **ONE_STAGE)
    setting = setting_for(config)
    names = {name for name, _ in build_real(config, setting).named_modules()}
    found: dict[str, set[str]] = {"forward": set(), "backward": set()}
    for phase, operation in ledger_of(config, setting).operations():
        if is_of_the_graph(operation.name):
            found[phase].add(operation.path)
    for paths in found.values():
        assert {"layers.0.blocks.1.mlp.fc1", "head"} <= paths <= names


def test_what_backward_holds_counts_as_activations() -> None:
    config = tiny("native", **ONE_STAGE)
    tags = Counter(e.category for e in ledger_of(config, setting_for(config)).events
                   if isinstance(e, Tagged))  # fmt: skip
    assert tags["activations"] > 20
    assert tags["gradients"] > 20


class Batchnormed(nn.Module):
    """Its graph returns the new statistics beside the logits, which are one entry of a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.body(images)
        return logits


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


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_module_of_ones_own_is_traced_compiled(mode: str) -> None:
    setting = TrainSetting(batch_size=4, precision="fp32", compile=mode)  # type: ignore[arg-type]
    eager = trace_estimate(OWN, setting.model_copy(update={"compile": "off"}), Batchnormed)
    compiled = trace_estimate(OWN, setting, Batchnormed)
    assert compiled.num_parameters == eager.num_parameters
    if mode == "default":
        for phase in ("backward", "optimizer", "zero_grad"):
            assert sum(alive_after(compiled, phase)) == sum(alive_after(eager, phase))
    assert any("traced on fake tensors with torch" in note for note in compiled.notes)


@pytest.mark.compiler
def test_a_pooling_net_is_traced_compiled_in_a_process_that_compiled_nothing() -> None:
    """Its decomposition reads a module of Inductor's that it does not import (torch 2.14)."""
    code = (
        "from planner import TrainSetting; from planner.core.schema import FactoryModel; "
        "from planner.trace.ledger import trace_estimate; from torch import nn; "
        "model = FactoryModel(factory='own:build', image_size=(8, 8), num_classes=10); "
        "setting = TrainSetting(batch_size=4, compile='default'); "
        "trace_estimate(model, setting, lambda: nn.Sequential("
        "nn.Conv2d(3, 10, 1), nn.MaxPool2d(8), nn.Flatten()))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_backends_failure_is_named_by_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> object:
        raise AttributeError("no such pass")

    monkeypatch.setattr("torch._inductor.decomposition.select_decomp_table", broken)
    with pytest.raises(PlannerError, match=r"compiled by torch \(AttributeError\): no such"):
        trace_estimate(OWN, TrainSetting(batch_size=4, compile="default"), Batchnormed)


class Interpolated(nn.Module):
    """Eager its logits are fp32 under autocast, compiled bf16 (torch 2.14 on an emulated A100)."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, 10, 8)

    def forward(self, images: Tensor) -> Tensor:
        return functional.interpolate(self.head(images), (1, 1), mode="bilinear").flatten(1)


def test_what_compiling_leaves_in_16_bits_is_traced() -> None:
    setting = TrainSetting(batch_size=4, precision="bf16", compile="default")
    ledger = trace_estimate(OWN, setting, Interpolated)
    assert any(e.label == "aten._log_softmax" for e in ledger.events if isinstance(e, Allocated))


def test_a_module_that_is_several_graphs_is_said_to_be() -> None:
    with pytest.raises(PlannerError, match="own:build cannot be compiled as one graph"):
        trace_estimate(OWN, TrainSetting(batch_size=4, compile="default"), Reading)
