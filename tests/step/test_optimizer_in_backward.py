"""Weights that backward updates as soon as their gradients are there: memory, results and time."""

from __future__ import annotations

import pytest

from planner.core.schema import ResolvedSetting, SwinConfig, TrainSetting
from planner.ledger.ledger import OPTIMIZER_CALL, Ledger
from planner.libraries.names import find_library
from planner.machine.hardware import find_gpu
from planner.step.training import record_training
from planner.throughput.prediction import (
    fuse_operations,
    predict_step,
    regions_of,
    with_updates_last,
)
from planner.throughput.rates import rates_for
from tests.building import build_real
from tests.equality import recorded
from tests.libraries.steps import (
    Changes,
    assert_equal_to_torch,
    name_of,
    needs,
    require,
    setting_of,
)
from tests.step.test_whole_step import ONE_BLOCK, small

torch_and_timm = needs("torch", "timm")


STEPS: list[tuple[str, int, Changes]] = [
    ("native", 1, {"checkpointing": "blocks", "lora_rank": 4, "optimizer": "adamw-foreach"}),
    ("native", 2, {"frozen_stages": 1, "optimizer": "adafactor"}),
    ("timm", 1, {"optimizer": "adamw-fused", "precision": "fp32", "ema": True}),
]


def in_backward(changes: Changes) -> TrainSetting:
    return setting_of({"optimizer_in_backward": True, **changes})


@torch_and_timm
@pytest.mark.parametrize(("library", "version", "changes"), STEPS, ids=name_of)
def test_a_step(library: str, version: int, changes: Changes) -> None:
    require(library)
    assert_equal_to_torch(small(library, version=version, depths=(1, 1)), in_backward(changes))


@torch_and_timm
@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.compiler)])
def test_the_weights_are_those_of_one_step_after_backward(backend: str | None) -> None:
    """Bit for bit, eager and compiled: hooks run after a compiled backward as after any."""
    import torch

    from planner.training.building import build_training
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
            training.call = torch.compile(module, backend=backend, dynamic=False)
        for _ in range(3):
            training.step()
        assert all(p.grad is None for p in module.parameters())
        found.append([p.detach() for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def of_shapes(setting: TrainSetting, config: SwinConfig) -> tuple[Ledger, ResolvedSetting]:
    spec = find_library(config.library)
    resolved = spec.resolve(config, setting)
    return record_training(spec.on_shapes(config, resolved), config, resolved), resolved


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
        ordered = with_updates_last(list(ledger.operations()), setting)
        ordered, _ = fuse_operations(ordered, regions_of(ordered, setting))
        backwards.append([operation for phase, operation in ordered if phase == "backward"])
    assert backwards[0] == backwards[1]
