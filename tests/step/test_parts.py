"""Parts of a step on shapes, each by itself: repeats, frames, attention's backward."""

from collections.abc import Iterator
from typing import Any

import pytest

from planner.core.schema import ResolvedSetting, SwinConfig, TrainSetting
from planner.estimation.estimate import read_resolved
from planner.ledger.ledger import OPTIMIZER_CALL, Ledger
from planner.libraries.names import find_library
from planner.machine.hardware import find_gpu
from planner.step.matmul import backward_scratch
from planner.step.tensor import _callers_keep_arguments
from planner.step.training import ShapeTraining, run_on_shapes
from planner.throughput.fusion import find_regions, fuse_operations, move_updates_last
from planner.throughput.prediction import predict_step
from planner.throughput.rates import rates_for
from tests.step.test_whole_step import ONE_BLOCK, small
from tests.steps import (
    Changes,
    assert_equal_to_torch,
    build_real,
    name_of,
    needs,
    on_shapes,
    recorded,
    require,
    setting_of,
)

# The second step that is read off the first is the one that a second step records.

SMALL = {"image_size": (56, 56), "depths": (2, 2), "num_heads": (1, 2), "embed_dim": 32}
SETTINGS: tuple[dict[str, Any], ...] = (
    {"accumulate": 3, "checkpointing": "selective", "precision": "pure-bf16", "clip_grad": True},
    {"optimizer": "adamw-fused", "checkpointing": "blocks:3", "ema": True},
    {"optimizer": "lion", "clip_grad": True},
    {"loss": "soft-target", "memory_format": "channels_last"},
    {"offload": "activations", "accumulate": 2},
    {"optimizer_in_backward": True},
    {"parallelism": "ddp"},
)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_it_is_the_step_that_would_be_recorded(
    setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, chosen = read_resolved("native:swin_tiny", {"batch_size": 4, **setting}, None, SMALL)
    build = on_shapes(config, chosen)
    found = run_on_shapes(build, config, chosen)
    monkeypatch.setattr(ShapeTraining, "is_repeatable", False)
    assert found == run_on_shapes(build, config, chosen)


# A ledger is the same whatever evaluates Python's frames around it.

TINY = SwinConfig(
    library="timm", image_size=(56, 56), depths=(2, 2), num_heads=(1, 2), embed_dim=32
)


def ledger_here() -> Ledger:
    setting = TrainSetting(batch_size=3, attention="eager")
    return run_on_shapes(on_shapes(TINY, setting), TINY, setting)


@pytest.fixture
def dynamo() -> Iterator[None]:
    """torch.compile's evaluator, as a thread that ended within a compiled call leaves it behind."""
    import torch._dynamo.eval_frame as dynamo

    before = dynamo.set_eval_frame(False)
    yield
    dynamo.set_eval_frame(before)


def test_compiling_elsewhere_changes_no_ledger(request: pytest.FixtureRequest) -> None:
    alone = ledger_here()
    request.getfixturevalue("dynamo")
    assert _callers_keep_arguments()
    assert ledger_here() == alone


# What the backward of memory-efficient attention takes besides its results.


def test_the_workspace_is_a_block_for_each_64_queries_of_a_head() -> None:
    """Derived: Swin-T's first stage at batch 64: 4,096 windows, 3 heads, 49 queries, one block of
    16 + 64 * 64 * 4 B each."""
    found = backward_scratch((4096, 3, 49, 32), is_half=True)
    assert found == (0, 0, 4096 * 3 * 49 * 4, 201_523_200)
    # Windows of 12: 144 queries are three blocks; heads wider than 64 channels are two.
    assert backward_scratch((10, 2, 144, 32), is_half=True).workspace == 10 * 2 * 3 * 16_400
    assert backward_scratch((10, 2, 49, 96), is_half=True).workspace == 10 * 2 * 2 * 16_400


def test_in_fp32_the_whole_product_comes_first() -> None:
    delta = 10 * 2 * 49 * 4
    assert backward_scratch((10, 2, 49, 32), is_half=False)[:3] == (32 * delta, delta, delta)
    assert backward_scratch((10, 1, 49, 32), is_half=False).sums == 0  # no copy to turn it round


torch_and_timm = needs("torch", "timm")


IN_BACKWARD: list[tuple[str, int, Changes]] = [
    ("native", 1, {"checkpointing": "blocks", "lora_rank": 4, "optimizer": "adamw-foreach"}),
    ("native", 2, {"frozen_stages": 1, "optimizer": "adafactor"}),
    ("timm", 1, {"optimizer": "adamw-fused", "precision": "fp32", "ema": True}),
]


def in_backward(changes: Changes) -> TrainSetting:
    return setting_of({"optimizer_in_backward": True, **changes})


@torch_and_timm
@pytest.mark.parametrize(("library", "version", "changes"), IN_BACKWARD, ids=name_of)
def test_a_step(library: str, version: int, changes: Changes) -> None:
    require(library)
    assert_equal_to_torch(small(library, version=version, depths=(1, 1)), in_backward(changes))


@torch_and_timm
@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.compiler)])
def test_the_weights_are_those_of_one_step_after_backward(backend: str | None) -> None:
    """Bit for bit, eager and compiled: hooks run after a compiled backward as after any."""
    import torch

    from planner.training.assembly import build_training
    from planner.training.step import Training
    from planner.training.tasks import as_task

    found = []
    config = small(drop_path_rate=0.0, depths=(1,), num_heads=(3,))
    for setting in (in_backward({}), setting_of({})):
        setting = setting.model_copy(update={"precision": "fp32", "attention": "eager"})
        torch.manual_seed(0)
        module = build_real(config, setting)
        task = as_task(module, config, setting)
        training = build_training(Training, task, config, setting, torch.device("cpu"))
        if backend:
            training.compiled_model = torch.compile(module, backend=backend, dynamic=False)
        for _ in range(3):
            training.step()
        assert all(p.grad is None for p in module.parameters())
        found.append([p.detach() for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def of_shapes(setting: TrainSetting, config: SwinConfig) -> tuple[Ledger, ResolvedSetting]:
    spec = find_library(config.library)
    resolved = spec.resolve(config, setting)
    return run_on_shapes(spec.on_shapes(config, resolved), config, resolved), resolved


@torch_and_timm
def test_both_makers_count_a_call_for_each_weight() -> None:
    config, setting = ONE_BLOCK, in_backward({"attention": "eager"})
    on_shapes, resolved = of_shapes(setting, config)
    number = sum(p.requires_grad for p in build_real(config, setting).parameters())
    for ledger in (on_shapes, recorded(config, resolved)):
        updates = [o for phase, o in ledger.operations() if phase == "optimizer"]
        assert sum(o.name == OPTIMIZER_CALL for o in updates) == number


def test_the_updates_are_the_optimizers_time_wherever_they_run() -> None:
    """The device does the same work; the host calls an optimizer for each weight."""
    config, gpu = small(depths=(2, 2), embed_dim=96), find_gpu("a100-sxm4-80gb")
    plain, moved = (
        predict_step(ledger.operations(), rates_for(gpu), setting)
        for ledger, setting in (of_shapes(s, config) for s in (setting_of({}), in_backward({})))
    )
    assert set(moved.phase_seconds) == {"forward", "backward", "optimizer"}
    assert moved.phase_seconds["optimizer"] > 5 * plain.phase_seconds["optimizer"]
    assert moved.host_seconds > 1.5 * plain.host_seconds
    assert moved.step_seconds > plain.step_seconds, "a small step waits for the host"


def test_updates_follow_a_compiled_backward() -> None:
    """They do not part its fused chains: it hands over all gradients as it returns."""
    backwards = []
    for setting in (setting_of({}), in_backward({})):
        ledger, _ = of_shapes(setting, small())
        ordered = move_updates_last(list(ledger.operations()), setting)
        ordered, _ = fuse_operations(ordered, find_regions(ordered, setting))
        backwards.append([operation for phase, operation in ordered if phase == "backward"])
    assert backwards[0] == backwards[1]
