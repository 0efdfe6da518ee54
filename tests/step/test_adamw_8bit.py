"""AdamW with 8-bit moments: the bytes of its state, what its step takes, and what it costs."""

from __future__ import annotations

import sys

import pytest

from planner.core.errors import PlannerError, UsageError
from planner.core.schema import TrainSetting, parse
from planner.estimation.estimate import estimate
from planner.ledger.ledger import COMPILED_CALL, Computed
from planner.libraries.adapters_on_shapes import named_parameters
from planner.machine.hardware import find_gpu
from planner.step.optimizers import make_optimizer
from planner.step.optimizers.adamw_8bit import UPDATE, is_quantised
from planner.step.tensor import Device, Parameter
from planner.throughput.prediction import host_seconds, rates_for
from tests.building import on_shapes
from tests.libraries.steps import Changes, assert_equal_to_torch, name_of, needs, setting_of
from tests.step.test_whole_step import ONE_BLOCK, small

with_torchao = needs("torch", "timm", "torchao")
EIGHT: Changes = {"optimizer": "adamw-8bit"}


@with_torchao
@pytest.mark.parametrize(
    "changes",
    [{"precision": "pure-bf16"}, {"precision": "fp16", "accumulate": 2, "clip_grad": True}],
    ids=name_of,
)
def test_a_step(changes: Changes) -> None:
    """Real states of torchao on fake tensors; its compiled step is stood in for on both sides."""
    assert_equal_to_torch(ONE_BLOCK, setting_of({**EIGHT, **changes}))


# Below 4096, at it, above it and no multiple of 256, and a matrix.
SHAPES = ((4095,), (4096,), (4097,), (16, 256), (96, 48), (3, 3, 7, 65), (1000, 768))


@with_torchao
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_states_are_those_of_real_tensors(dtype: str) -> None:
    """torchao's own buffers on the CPU: codes, scales and table, or moments as the weight is."""
    import torch
    from torchao.optim import AdamW8bit

    real = AdamW8bit([torch.nn.Parameter(torch.zeros(4))], lr=1e-3)
    for shape in SHAPES:
        weight = torch.zeros(shape, dtype=getattr(torch, dtype))
        made: list[int] = []
        for signed in (True, False):
            moment = real._new_buffer(weight, signed)  # type: ignore[attr-defined]
            names = moment.__tensor_flatten__()[0] if hasattr(moment, "codes") else ()
            parts = [getattr(moment, name) for name in names] or [moment]
            made += [part.untyped_storage().nbytes() for part in parts]
        device = Device(float_dtype=dtype)
        setting = setting_of({**EIGHT, "precision": "fp32"})
        ours = make_optimizer(device, [Parameter(device, shape)], setting)
        ours.step()
        assert [t.storage.num_bytes for kept in ours.state.values() for t in kept] == made, shape


@with_torchao
@pytest.mark.compiler
def test_what_a_compiled_step_takes() -> None:
    """The profiler's peak within one compiled step: the two moments in fp32 and their scales."""
    import torch
    from torch.profiler import ProfilerActivity, profile
    from torchao.optim import AdamW8bit

    weight = torch.nn.Parameter(torch.randn(64, 256))
    weight.grad = torch.randn(64, 256)
    optimizer = AdamW8bit([weight], lr=1e-3)
    optimizer.step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        optimizer.step()
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    found, todo = [], list(results.experimental_event_tree())
    while todo:
        event = todo.pop()
        todo += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
    taken = [size for _, size in sorted(found) if abs(size) >= 256]
    assert taken == [256, 256, 65536, 65536, -256, -256, -65536, -65536]


def test_the_state_is_a_quarter() -> None:
    """By the rule: two bytes an element, 8 bytes a block, 2 KiB a weight; else 8 bytes."""
    config = small(embed_dim=192, num_heads=(6, 12))
    device = Device()
    sizes = [p.numel for _, p in named_parameters(on_shapes(config, setting_of({}))(device))]
    wanted = 0
    for numel in sizes:
        parts = [numel, numel // 256 * 4, 1024] if is_quantised(numel) else [numel * 4]
        wanted += 2 * sum(-(-part // 512) * 512 for part in parts)
    eight, plain = (estimate(config, setting_of({"optimizer": o})) for o in ("adamw-8bit", "adamw"))
    assert eight.breakdown["optimizer_state"] == wanted
    assert wanted < 0.3 * plain.breakdown["optimizer_state"]
    assert any("adamw-8bit" in line for line in eight.assumed)
    assert any("adamw-8bit" in line for line in eight.left_out)


def test_each_weight_costs_the_host_a_call() -> None:
    gpu = find_gpu("a100-sxm4-80gb")
    rates = rates_for(gpu)
    device = Device()
    weights = [Parameter(device, (64, 256)), Parameter(device, (64,))]
    make_optimizer(device, weights, setting_of(EIGHT)).step()
    work = [event for event in device.events if isinstance(event, Computed)]
    assert [event.name for event in work] == [COMPILED_CALL, UPDATE] * 2
    call, update = (host_seconds("optimizer", event, rates, "off") for event in work[:2])
    assert call > 10 * update
    eight, plain = (
        estimate(small(), setting_of({"optimizer": o}), gpu=gpu) for o in ("adamw-8bit", "adamw")
    )
    assert eight.throughput is not None
    assert plain.throughput is not None
    assert eight.throughput.images_per_second < plain.throughput.images_per_second


def test_it_does_not_step_inside_backward() -> None:
    with pytest.raises(UsageError, match="not known to run inside backward"):
        parse(TrainSetting, {**EIGHT, "optimizer_in_backward": True}, "the setting")


def test_a_missing_torchao_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from planner.training.building import importing, make_optimizers, step_setting
    from planner.training.levers import use_float8

    setting, weights = setting_of(EIGHT), [torch.nn.Parameter(torch.zeros(2))]
    for name in [name for name in sys.modules if name.startswith("torchao.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(PlannerError, match=r"pip install 'planner\[torchao\]'"), importing():
        make_optimizers(weights, None, setting, step_setting(small(), setting))
    with pytest.raises(PlannerError, match="needs torchao, which is not installed"), importing():
        use_float8(torch.nn.Linear(64, 64))
