"""What torchao does in a step, recorded: optimizers on the host, and moments in 8 bits."""

import sys

import pytest

from planner.core.errors import UnsupportedError
from planner.estimation.estimate import estimate
from planner.ledger.ledger import COMPILED_CALL, GRADIENT_TO_HOST, WEIGHT_TO_DEVICE
from planner.libraries.names import find_library
from planner.machine.hardware import find_gpu
from planner.throughput.rates import rates_for
from tests.step.test_whole_step import small
from tests.steps import Changes, build_real, needs, recorded, setting_of

pytestmark = [needs("torch", "timm", "torchao"), pytest.mark.timeout(400)]
CONFIG = small("native", depths=(1, 1), embed_dim=48)
SMALLEST = 4096  # elements below which torchao leaves a weight alone
BLOCK = 256  # elements of one scale
STATE, BOTH = "state", "state-and-gradients"
EIGHT: Changes = {"optimizer": "adamw-8bit"}


def sizes_of(changes: Changes, *names: str) -> list[list[int]]:
    """Bytes of each operation of the steady step that has one of `names`."""
    resolved = find_library("native").resolve(CONFIG, setting_of(changes))
    operations = [operation for _, operation in recorded(CONFIG, resolved).operations()]
    return [sorted(o.num_bytes for o in operations if o.name == name) for name in names]


def test_each_large_weight_crosses_once_each_way() -> None:
    changes = {"offload_optimizer": STATE}
    module = build_real(CONFIG, setting_of({}))
    large = sorted(4 * p.numel() for p in module.parameters() if p.numel() >= SMALLEST)
    assert sizes_of(changes, GRADIENT_TO_HOST, WEIGHT_TO_DEVICE) == [large, large]
    pinned = estimate(CONFIG, setting_of(changes)).pinned_host_bytes
    assert pinned == 2 * sum(1 << (size - 1).bit_length() for size in large)


def test_state_and_gradients_are_not_on_the_device() -> None:
    """At batch 1 a Swin-L is mostly its weights, their gradients and their state. The rate is an
    upper bound: weights come back over the link after backward, and what the host's processor takes
    nobody knows."""
    gpu = find_gpu("rtx-3090")
    plain, state, both = (
        estimate("native:swin_large", batch_size=1, clip_grad=False, offload_optimizer=how, gpu=gpu)
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
    assert any("their memory is used again only once they are" in line for line in both.assumed)
    assert plain.throughput.is_whole
    assert not state.throughput.is_whole
    assert any("the update of weights on the host" in line for line in state.left_out)
    crossing = state.throughput.kind_seconds["transfer"]
    assert crossing == pytest.approx(weights / rates_for(gpu).link_bandwidth, rel=0.05)


def test_on_a_cpu_the_optimizer_is_the_plain_one() -> None:
    """It is on the host already."""
    import torch

    from planner.training.assembly import make_optimizers, step_setting

    weight = torch.nn.Parameter(torch.zeros(SMALLEST))
    setting = setting_of({"offload_optimizer": BOTH})
    (made,) = make_optimizers([weight], None, setting, step_setting(CONFIG, setting))
    assert type(made) is torch.optim.AdamW


@pytest.mark.compiler
def test_moments_in_8_bits_take_a_quarter_and_each_weight_a_call() -> None:
    """By torchao's rule: two bytes an element, 8 bytes a block, 2 KiB a weight; else 8 bytes."""
    sizes = [p.numel() for p in build_real(CONFIG, setting_of({})).parameters()]
    wanted = 0
    for numel in sizes:
        in_blocks = numel >= SMALLEST and numel % BLOCK == 0
        parts = [numel, numel // BLOCK * 4, 1024] if in_blocks else [numel * 4]
        wanted += 2 * sum(-(-part // 512) * 512 for part in parts)
    eight = estimate(CONFIG, setting_of(EIGHT))
    assert eight.breakdown["optimizer_state"] == wanted
    assert any("adamw-8bit" in line for line in eight.left_out)
    (calls,) = sizes_of(EIGHT, COMPILED_CALL)
    assert len(calls) == len(sizes)


def test_a_missing_torchao_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from planner.training.assembly import make_optimizers, step_setting, try_imports
    from planner.training.levers import use_float8

    setting, weights = setting_of(EIGHT), [torch.nn.Parameter(torch.zeros(2))]
    for name in [name for name in sys.modules if name.startswith("torchao.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'planner\[torchao\]'"), try_imports():
        make_optimizers(weights, None, setting, step_setting(small(), setting))
    with pytest.raises(UnsupportedError, match="torchao, which is not installed"), try_imports():
        use_float8(torch.nn.Linear(64, 64))
