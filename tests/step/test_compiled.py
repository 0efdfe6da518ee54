"""A compiled step on shapes: its partition beside torch's own, its ledger beside the eager one.

Shown on torch 2.13.0. The oracle is `planner.trace.partition`: Dynamo, AOTAutograd, Inductor's
passes over the joint graph and the min-cut partitioner, run on the real module under CUDA's rules.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from typing import Any

import networkx
import pytest

from planner import estimate
from planner.ledger import Allocated, Computed, Freed, Ledger, Marked, Tagged
from planner.libraries.registry import find_library
from planner.libraries.resolve import resolve_model
from planner.schema import SwinConfig, TrainSetting
from planner.step.compiled.flow import Network
from planner.step.compiled.graph import Graph
from planner.step.compiled.ledger import CompiledRecorder
from planner.step.compiled.module import peak_bytes
from planner.step.compiled.operators import RANDOM, RECOMPUTABLE, VIEWS
from planner.step.compiled.partition import Partition, partition
from planner.step.compiled.recording import record_graph
from planner.step.strides import Shape
from planner.step.training import record_training
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
    return SwinConfig(library=library, **{**TINY, **changes})


def setting_for(config: SwinConfig, **changes: Any) -> TrainSetting:
    setting = TrainSetting(**{"batch_size": 2, **changes})
    return find_library(config.library).resolve(config, setting)


def graph_of(config: SwinConfig, setting: TrainSetting) -> Graph:
    build = on_shapes(config, setting)
    images = (setting.batch_size, config.in_channels, *config.image_size)
    dtype = "bfloat16" if setting.precision == "pure-bf16" else "float32"
    return record_graph(build, (images, dtype), setting.autocast_dtype, dtype)[0]


def ledger_of(config: SwinConfig, setting: TrainSetting) -> Ledger:
    build = on_shapes(config, setting)
    return CompiledRecorder(build, config, setting).ledger(setting.batch_size)


def eager_ledger_of(config: SwinConfig, setting: TrainSetting) -> Ledger:
    return record_training(on_shapes(config, setting), config, setting)


def saved_tensors(parts: Partition) -> Counter[tuple[Shape, str]]:
    """(shape, dtype) of each intermediate that is saved. Not of the positions that a roll indexes
    by, some hundred bytes: a shift by 0 along one side makes one row of them less."""
    saved = ((node.shape or (), node.dtype) for node in parts.saved_intermediates())
    return Counter((shape, dtype) for shape, dtype in saved if (len(shape), dtype) != (1, "int64"))


def assert_saves_as_torch(config: SwinConfig, setting: TrainSetting) -> None:
    """The same tensors, by shape and dtype, as forward's outputs of the real partition; and the
    transcribed partitioner chooses the same nodes of the real joint graph."""
    from planner.trace.partition import partition_compiled

    find_library(config.library)
    real = partition_compiled(lambda: build_real(config, setting), config, setting)
    on_real_graph = partition(real.graph())
    names = [node.name for node in real.joint.graph.nodes]
    chosen = {names[node.index] for node in on_real_graph.saved_intermediates()}
    assert chosen == {node.name for node in real.saved()}
    mine = partition(graph_of(config, setting))
    assert saved_tensors(mine) == saved_tensors(on_real_graph)
    assert abs(mine.saved_bytes() - real.saved_bytes()) < 1024
    if config.image_size[0] == config.image_size[1]:
        assert mine.saved_bytes() == real.saved_bytes()


QUICK: list[tuple[str, Changes, Changes]] = [
    ("timm", {}, BF16),
    ("timm", {"version": 2, "drop_path_rate": 0.1}, BF16),
    ("timm", {"drop_path_rate": 0.1}, {**BF16, "checkpointing": "blocks"}),
    ("torchvision", {"version": 2}, BF16),
    ("torchvision", {"drop_path_rate": 0.1}, {"precision": "fp32"}),
    ("transformers", {}, BF16),
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
    ("timm", {}, {**BF16, "attention": "sdpa"}),
    ("timm", {"drop_rate": 0.1, "attn_drop_rate": 0.1}, BF16),
    ("timm", {"image_size": (64, 48)}, BF16),
    ("transformers", {"drop_rate": 0.1, "drop_path_rate": 0.1}, {"attention": "eager"}),
    ("native", {"drop_rate": 0.1, "drop_path_rate": 0.2}, BF16),
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
def test_saves_what_the_real_partition_saves(
    library: str, model: Changes, changes: Changes
) -> None:
    _assert_case(library, {**ONE_STAGE, **model}, changes)


@pytest.mark.combinations
@pytest.mark.parametrize(("library", "model", "changes"), MORE, ids=name_of)
def test_saves_what_more_real_partitions_save(
    library: str, model: Changes, changes: Changes
) -> None:
    _assert_case(library, model, changes)


def _assert_case(library: str, model: Changes, changes: Changes) -> None:
    if library != "native" and find_spec(library) is None:
        pytest.skip(f"not installed: {library}")
    config = tiny(library, **model)
    assert_saves_as_torch(config, setting_for(config, **changes))


@pytest.mark.combinations
@needs("timm")
def test_pure_bf16_saves_wider_statistics_than_on_a_cpu() -> None:
    """Lowered for a CPU, layer norm's mean and rstd are rounded to bf16 (`native_layer_norm` in
    torch/_refs); on CUDA they stay fp32. They are all that differs."""
    from planner.trace.partition import partition_compiled

    config = tiny("timm")
    setting = setting_for(config, precision="pure-bf16")
    real = partition_compiled(lambda: build_real(config, setting), config, setting).saved_bytes()
    mine = partition(graph_of(config, setting))
    statistics = sum(
        node.num_bytes
        for node in mine.saved_intermediates()
        if node.op in ("getitem", "rsqrt") and node.dtype == "float32"
    )
    assert real < mine.saved_bytes() <= real + statistics // 2


@pytest.mark.published
@needs("timm", "torchvision", "transformers")
@pytest.mark.parametrize(("name", "changes"), PUBLISHED, ids=name_of)
def test_saves_what_published_models_save(name: str, changes: Changes) -> None:
    config = resolve_model(name, {})
    assert_saves_as_torch(config, setting_for(config, **changes))


@pytest.mark.combinations
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
    """Of the half that has the peak, which is what a step needs. Not equal: see `inductor.py`."""
    if library != "native" and find_spec(library) is None:
        pytest.skip(f"not installed: {library}")
    from tests.step.inductor import inductor_peaks

    config = tiny(library, **{**ONE_STAGE, **model})
    setting = setting_for(config, batch_size=16, **changes)
    build = on_shapes(config, setting)
    mine = peak_bytes(CompiledRecorder(build, config, setting).compiled(16))
    real = inductor_peaks(config, setting)
    print(name_of(model), {half: mine[half] / real[half] for half in mine})
    assert max(mine.values()) == pytest.approx(max(real.values()), rel=0.06)


def test_operators_are_torchs() -> None:
    from torch._functorch.partitioners import get_default_op_list

    def names(operators: Any) -> set[str]:
        return {str(getattr(op, "__name__", op)).rpartition(".")[2] for op in operators}

    known = get_default_op_list()
    assert names(known.view_ops) == VIEWS
    assert names(known.random_ops) == RANDOM
    recomputable = names(known.recomputable_ops)
    assert recomputable >= RECOMPUTABLE
    met: set[str] = set()
    for library in LIBRARIES:
        for version in (1, 2):
            config = tiny(library, version=version, drop_path_rate=0.1)
            met |= {node.op for node in graph_of(config, setting_for(config)).nodes}
    assert not met & (recomputable - RECOMPUTABLE)


@pytest.mark.parametrize("seed", range(20))
def test_cuts_as_networkx_does(seed: int) -> None:
    """Among equal cuts too: the partitioner takes the one that networkx finds."""
    rng = random.Random(seed)
    size = rng.randint(4, 40)
    mine, theirs = Network(size), networkx.DiGraph()
    theirs.add_nodes_from(range(size))
    pairs = {(rng.randrange(size), rng.randrange(size)) for _ in range(4 * size)}
    for tail, head in sorted(pairs):
        if tail != head and (head, tail) not in theirs.edges:
            capacity = rng.choice((0, 1, 1, 2, 3, 7))
            mine.connect(tail, head, capacity)
            theirs.add_edge(tail, head, capacity=capacity)
    _, (_, sink_side) = networkx.minimum_cut(theirs, 0, size - 1)
    assert mine.sink_side(0, size - 1) == sink_side


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("version", [1, 2])
def test_graph_at_any_batch_lies_on_the_line(library: str, version: int) -> None:
    config = tiny(library, version=version, drop_path_rate=0.1)
    setting = setting_for(config)
    build = on_shapes(config, setting)
    between = CompiledRecorder(build, config, setting).compiled(5)
    recorded = graph_of(config, setting.model_copy(update={"batch_size": 5}))
    parts = partition(recorded)
    assert [(v.op, v.shape) for v in between.saved] == [(v.op, v.shape) for v in parts.saved]


def live_at_ends(ledger: Ledger) -> dict[str, int]:
    """Live bytes at the end of each phase of the last step."""
    sizes: dict[int, int] = {}
    ends = {}
    for event in ledger.events:
        if isinstance(event, Allocated):
            assert event.storage not in sizes
            sizes[event.storage] = event.num_bytes
        elif isinstance(event, Freed):
            del sizes[event.storage]
        elif isinstance(event, Marked):
            ends[event.phase] = sum(sizes.values())
    return ends


@pytest.mark.parametrize("checkpointing", ["none", "blocks"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_step_ends_as_the_eager_one(library: str, checkpointing: str) -> None:
    """Of a compiled step nothing stays but gradients, whatever was alive within it."""
    config = tiny(library, drop_path_rate=0.1)
    setting = setting_for(config, checkpointing=checkpointing, compile="default")
    compiled, eager = (
        live_at_ends(ledger_of(config, setting)),
        live_at_ends(eager_ledger_of(config, setting)),
    )
    for phase in ("backward", "optimizer", "zero_grad"):
        assert compiled[phase] == eager[phase]
    if checkpointing == "none":
        assert compiled["forward"] < eager["forward"]


def test_gradients_are_added_up_over_micro_batches() -> None:
    config = tiny("timm")
    setting = setting_for(config, accumulate=2, compile="default")
    ends = live_at_ends(ledger_of(config, setting))
    assert ends["backward"] == live_at_ends(eager_ledger_of(config, setting))["backward"]


def peak_of(ledger: Ledger) -> int:
    live = peak = 0
    sizes: dict[int, int] = {}
    for event in ledger.events:
        if isinstance(event, Allocated):
            sizes[event.storage] = event.num_bytes
            live += event.num_bytes
            peak = max(peak, live)
        elif isinstance(event, Freed):
            live -= sizes.pop(event.storage)
    return peak


@pytest.mark.parametrize("library", LIBRARIES)
def test_graphs_keep_their_pool_through_the_optimizer(library: str) -> None:
    config = tiny(library)
    default = ledger_of(config, setting_for(config, compile="default"))
    graphed = ledger_of(config, setting_for(config, compile="reduce-overhead"))
    ends = live_at_ends(graphed)
    assert ends["optimizer"] > live_at_ends(default)["optimizer"]
    assert ends["optimizer"] == ends["zero_grad"] == ends["backward"]
    assert peak_of(graphed) >= peak_of(default)
    assert graphed.pooled_saved_bytes > 0
    pools = [e for e in graphed.events if isinstance(e, Allocated) and "pool" in e.label]
    assert len(pools) == 3
    freed = {e.storage for e in graphed.events if isinstance(e, Freed)}
    assert len(graphed.events) > max(p.storage for p in pools)
    assert freed.isdisjoint(p.storage for p in pools)


def test_fused_kernels_move_less_than_eager_ones() -> None:
    config = tiny("timm")
    setting = setting_for(config, compile="default")

    def moved(ledger: Ledger) -> int:
        return sum(
            op.num_bytes
            for phase, op in ledger.operations()
            if phase in ("forward", "backward") and op.kind in ("pointwise", "reduction", "copy")
        )

    assert moved(ledger_of(config, setting)) < 0.7 * moved(eager_ledger_of(config, setting))


def test_products_are_those_of_the_eager_step() -> None:
    config = tiny("timm")
    setting = setting_for(config, compile="default")

    def flops(ledger: Ledger) -> int:
        return sum(e.flops for e in ledger.events
                   if isinstance(e, Computed) and e.kind == "matmul")  # fmt: skip

    assert flops(ledger_of(config, setting)) == flops(eager_ledger_of(config, setting))


def test_what_backward_holds_counts_as_activations() -> None:
    config = tiny("native")
    ledger = ledger_of(config, setting_for(config, compile="default"))
    tags = Counter(e.category for e in ledger.events if isinstance(e, Tagged))
    assert tags["activations"] > 20
    assert tags["gradients"] > 20


def test_an_estimate_of_a_compiled_step_says_what_it_rests_on() -> None:
    eager = estimate("timm:swin_tiny_patch4_window7_224", batch_size=8, compile="off")
    compiled = estimate("timm:swin_tiny_patch4_window7_224", batch_size=8, compile="default")
    graphed = estimate("timm:swin_tiny_patch4_window7_224", batch_size=8, compile="max-autotune")
    assert compiled.saved_activation_bytes < eager.saved_activation_bytes
    assert graphed.saved_activation_bytes == pytest.approx(
        compiled.saved_activation_bytes, rel=0.01
    )
    assert any("partitioner" in note for note in compiled.assumed)
    assert any("high-water" in note for note in graphed.assumed)
    for found in (compiled, graphed):
        assert found.high_bytes - found.low_bytes > eager.high_bytes - eager.low_bytes
        assert any("Inductor" in left for left in found.left_out)
        assert sum(found.breakdown.values()) == found.device_total_bytes


def test_a_model_that_breaks_into_graphs_is_taken_for_eager() -> None:
    name = "transformers:microsoft/swin-tiny-patch4-window7-224"
    settings = {"batch_size": 4, "checkpointing": "blocks"}
    compiled = estimate(name, compile="default", **settings)
    eager = estimate(name, compile="off", **settings)
    assert compiled.peak_reserved_bytes == eager.peak_reserved_bytes
    assert any("several graphs" in left for left in compiled.left_out)


def test_needs_neither_torch_nor_networkx_and_leaves_the_profiler_as_it_was() -> None:
    program = (
        "import sys\n"
        "from planner import estimate\n"
        "sys.setprofile(hook := lambda *_: None)\n"
        "estimate('native:swin_tiny', batch_size=2, compile='default')\n"
        "assert sys.getprofile() is hook\n"
        "sys.setprofile(None)\n"
        "print([m for m in ('torch', 'networkx', 'numpy') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_traced_compiled_step_is_the_one_on_shapes(mode: str) -> None:
    """`--trace` takes the graph from torch, and everything behind it is the same."""
    from planner.trace import trace_estimate

    config = tiny("native", **ONE_STAGE)
    setting = setting_for(config, precision="bf16", compile=mode)
    traced, on_shapes = trace_estimate(config, setting), ledger_of(config, setting)
    assert traced.num_parameters == on_shapes.num_parameters
    assert peak_of(traced) == peak_of(on_shapes)
    assert live_at_ends(traced) == live_at_ends(on_shapes)


def test_a_module_of_ones_own_is_traced_compiled() -> None:
    from torch import nn

    from planner.schema import FactoryModel
    from planner.trace import trace_estimate

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)
        )

    model = FactoryModel(factory="own:build", image_size=(8, 8), num_classes=10)
    settings = [TrainSetting(batch_size=4, precision="fp32", compile=c) for c in ("off", "default")]  # type: ignore[arg-type]
    eager, compiled = (trace_estimate(model, setting, build) for setting in settings)
    assert compiled.num_parameters == eager.num_parameters
    assert live_at_ends(compiled)["backward"] == live_at_ends(eager)["backward"]
    assert any("traced with torch" in note for note in compiled.notes)
