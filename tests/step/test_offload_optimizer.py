"""An optimizer on the host: what the device sees of it, on shapes and for real, and its cost."""

from __future__ import annotations

import pytest

from planner.estimation.estimate import estimate
from planner.ledger.ledger import GRADIENT_TO_HOST, WEIGHT_TO_DEVICE
from planner.libraries.registry import find_library
from planner.machine.hardware import find_gpu
from planner.step.optimizers.offloaded import SMALLEST
from planner.step.training import record_training
from planner.throughput.prediction import rates_for
from tests.building import build_real
from tests.equality import recorded as as_torch
from tests.libraries.steps import Changes, assert_equal_to_torch, name_of, needs, setting_of
from tests.step.test_whole_step import small

torch_and_timm = needs("torch", "timm")
CONFIG = small("native", depths=(1, 1), embed_dim=48)
STATE, BOTH = "state", "state-and-gradients"
STEPS: list[Changes] = [
    {"offload_optimizer": STATE, "accumulate": 2, "optimizer": "adafactor", "lora_rank": 2},
    {
        "offload_optimizer": BOTH,
        "frozen_stages": 1,
        "validation_batch_size": 3,
        "checkpointing": "blocks",
        "offload": "activations",
    },
]


@torch_and_timm
@pytest.mark.parametrize("changes", STEPS, ids=name_of)
def test_a_step_equals_torch_s(changes: Changes) -> None:
    assert_equal_to_torch(CONFIG, setting_of(changes))


def recorded(changes: Changes) -> dict[str, list[int]]:
    """Bytes of each transfer of the steady step."""
    setting = setting_of(changes)
    resolved = find_library("native").resolve(CONFIG, setting)
    ledger = record_training(find_library("native").on_shapes(CONFIG, resolved), CONFIG, resolved)
    found: dict[str, list[int]] = {}
    for _, operation in ledger.operations():
        if operation.kind == "transfer":
            found.setdefault(operation.name, []).append(operation.num_bytes)
    return found


@torch_and_timm
def test_each_large_weight_crosses_once_each_way_and_torch_says_so_too() -> None:
    changes = {"offload_optimizer": STATE}
    module = build_real(CONFIG, setting_of({}))
    large = sorted(4 * p.numel() for p in module.parameters() if p.numel() >= SMALLEST)
    found = recorded(changes)
    assert sorted(found[GRADIENT_TO_HOST]) == sorted(found[WEIGHT_TO_DEVICE]) == large
    resolved = find_library("native").resolve(CONFIG, setting_of(changes))
    real = [o for _, o in as_torch(CONFIG, resolved).operations()]
    for name, sizes in found.items():
        assert sorted(sizes) == sorted(o.num_bytes for o in real if o.name == name)
    pinned = estimate(CONFIG, setting_of(changes)).pinned_host_bytes
    assert pinned == 2 * sum(1 << (size - 1).bit_length() for size in large)


def test_state_and_gradients_are_not_on_the_device() -> None:
    """At batch 1 a Swin-L is mostly its weights, their gradients and their state."""
    plain, state, both = (
        estimate("native:swin_large", batch_size=1, clip_grad=False, offload_optimizer=how)
        for how in ("none", STATE, BOTH)
    )
    weights = plain.breakdown["parameters"]
    assert plain.breakdown["optimizer_state"] > 1.99 * weights
    assert state.breakdown["optimizer_state"] < 0.01 * weights
    assert state.live_bytes["after_backward"] > 1.99 * weights
    assert both.live_bytes["after_backward"] < 1.02 * weights
    assert both.peak_live_bytes < state.peak_live_bytes < plain.peak_live_bytes - 2 * weights
    # Where memory is plentiful, gradients on their way are beside what comes after them.
    more = both.high_bytes - both.device_total_bytes
    assert more > state.high_bytes - state.device_total_bytes + 0.9 * weights


def test_the_rate_is_an_upper_bound() -> None:
    """Weights come back over the link after backward, gradients leave beside it; what the host's
    processor takes nobody knows."""
    gpu = find_gpu("rtx-3090")
    plain, moved = (
        estimate("native:swin_large", batch_size=1, clip_grad=False, offload_optimizer=how, gpu=gpu)
        for how in ("none", STATE)
    )
    assert plain.throughput is not None
    assert moved.throughput is not None
    assert plain.throughput.is_whole
    assert not moved.throughput.is_whole
    assert any("the update of weights on the host" in line for line in moved.left_out)
    crossing = moved.throughput.kind_seconds["transfer"]
    bandwidth = rates_for(gpu).link_bandwidth
    assert crossing == pytest.approx(plain.breakdown["parameters"] / bandwidth, rel=0.05)


@torch_and_timm
def test_on_a_cpu_the_optimizer_is_the_plain_one() -> None:
    """It is on the host already."""
    import torch

    from planner.training.building import make_optimizers, step_setting

    weight = torch.nn.Parameter(torch.zeros(SMALLEST))
    setting = setting_of({"offload_optimizer": BOTH})
    (made,) = make_optimizers([weight], None, setting, step_setting(CONFIG, setting))
    assert type(made) is torch.optim.AdamW
