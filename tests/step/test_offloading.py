"""Saved activations in the host's memory: on shapes, recorded, and with data over a false link."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
from pydantic import ValidationError

from planner import estimate
from planner.core.schema import SwinConfig, TrainSetting
from planner.ledger.ledger import TO_DEVICE, TO_HOST, Computed
from planner.libraries.names import find_library
from planner.machine.hardware import find_gpu
from planner.step.training import run_on_shapes
from planner.throughput.rates import LINK_SHARE
from tests.steps import assert_equal_to_torch, build_real, needs

pytestmark = needs("torch", "timm")

SMALL: dict[str, Any] = {
    "image_size": (56, 56), "depths": (1, 1), "num_heads": (3, 6), "embed_dim": 48,
    "num_classes": 10,
}  # fmt: skip
ONE_BLOCK: dict[str, Any] = {"depths": (1,), "num_heads": (3,)}


def setting(**changes: Any) -> TrainSetting:
    return TrainSetting(**{"batch_size": 2, "offload": "activations", **changes})


def config(library: str = "native", version: int = 1, **shape: Any) -> SwinConfig:
    return SwinConfig(library=library, version=version, **SMALL | shape)


# Library, version, model, setting. Queries, keys and values of fused attention are views of one
# storage, which moves once; others are several changes at once.
STEPS: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("timm", 2, {}, {"precision": "bf16", "checkpointing": "blocks", "attention": "eager"}),
    ("native", 1, {}, {"precision": "fp32", "attention": "sdpa"}),
    ("native", 1, {}, {"checkpointing": "selective", "precision": "fp16", "accumulate": 2,
                       "clip_grad": True}),
    ("native", 1, {}, {"checkpointing": "blocks:1", "attention": "sdpa", "frozen_stages": 1,
                       "optimizer_in_backward": True}),
    ("native", 1, ONE_BLOCK, {"lora_rank": 2, "memory_format": "channels_last"}),
]  # fmt: skip


@pytest.mark.parametrize(("library", "version", "shape", "changes"), STEPS, ids=str)
def test_a_step_equals_torch_s(
    library: str, version: int, shape: dict[str, Any], changes: dict[str, Any]
) -> None:
    assert_equal_to_torch(config(library, version, **shape), setting(**changes))


def operations(how: TrainSetting) -> list[Computed]:
    model = config()
    spec = find_library("native")
    how = spec.resolve(model, how)
    ledger = run_on_shapes(spec.on_shapes(model, how), model, how)
    return [operation for _, operation in ledger.operations()]


def test_what_goes_out_comes_back_once() -> None:
    found = operations(setting())
    out, back = ([op.num_bytes for op in found if op.name == n] for n in (TO_HOST, TO_DEVICE))
    assert sorted(out) == sorted(back)


def test_what_the_host_pins_is_what_leaves_in_blocks_of_powers_of_two() -> None:
    plain, moved = (
        estimate(config(), TrainSetting(offload=how)) for how in ("none", "activations")
    )
    assert plain.pinned_host_bytes == 0
    assert moved.saved_activation_bytes < 0.001 * plain.saved_activation_bytes
    sizes = [op.num_bytes for op in operations(setting(batch_size=64)) if op.name == TO_HOST]
    assert sum(sizes) == pytest.approx(plain.saved_activation_bytes, rel=0.001)
    assert moved.pinned_host_bytes == sum(2 ** math.ceil(math.log2(size)) for size in sizes)


def test_the_link_bounds_the_time() -> None:
    """A step takes longer by what both ways take at the link's rate, at least."""
    gpu = find_gpu("rtx-3090")
    plain, moved = (
        estimate(config(), setting(batch_size=1024, offload=how), gpu=gpu).throughput
        for how in ("none", "activations")
    )
    found = operations(setting(batch_size=1024))
    crossed = sum(op.num_bytes for op in found if op.kind == "transfer")
    crossing = crossed / (LINK_SHARE * gpu.link_bandwidth)
    more = moved.step_seconds - plain.step_seconds
    assert crossing <= more < 1.05 * crossing  # each copy starts too: 2% here


def test_a_compiled_step_is_refused() -> None:
    with pytest.raises(ValidationError, match="offload activations moves what an eager step saves"):
        setting(compile="default")


@contextmanager
def false_link() -> Iterator[list[int]]:
    """Two kinds of memory on a CPU: what was copied to the host, and all else. Gives the elements
    of each copy."""
    from planner.training import levers

    host: dict[int, Any] = {}
    sent: list[int] = []

    def is_on_host(tensor: Any) -> bool:
        return tensor.untyped_storage()._cdata in host

    def move(flat: Any) -> Any:
        copied = flat.clone()
        host[copied.untyped_storage()._cdata] = copied
        sent.append(flat.numel())
        return mock.Mock(back=copied.clone)

    with mock.patch.multiple(levers, is_on_host=is_on_host, Offloaded=move):
        yield sent


@pytest.mark.parametrize(("attention", "checkpointing"), [("eager", "blocks"), ("sdpa", "none")])
def test_gradients_are_those_without(attention: str, checkpointing: str) -> None:
    import torch

    from planner.training.levers import offload_activations

    model = config()
    how = TrainSetting(attention=attention, checkpointing=checkpointing)  # type: ignore[arg-type]
    torch.manual_seed(0)
    module = build_real(model, how)
    images = torch.randn(2, 3, 56, 56)

    def gradients(moved: AbstractContextManager[Any]) -> list[Any]:
        torch.manual_seed(1)
        module.zero_grad()
        with moved:
            loss = module(images).square().mean()
        loss.backward()
        return [p.grad.clone() for p in module.parameters() if p.grad is not None]

    plain, held = gradients(nullcontext()), (*module.parameters(), *module.buffers(), images)
    with false_link() as sent:
        moved = gradients(offload_activations(held))
    assert all(torch.equal(one, other) for one, other in zip(plain, moved, strict=True))
    assert len(sent) > 10


def test_a_storage_moves_once_and_again_when_it_was_written_to() -> None:
    """Views of one version share a copy; a weight's view, a scalar and the input stay."""
    import torch

    from planner.training.levers import offload_activations

    weight = torch.ones(4, 4, requires_grad=True)
    x = torch.ones(4, 4)
    with false_link() as sent:
        with offload_activations((weight, x)):
            y = x @ weight.t()  # saves x and a view of the weight: both stay
            assert sent == []
            a, b = y.sin().unbind()[:2]  # sin saves y
            assert sent == [16]
            c = a * b  # two views of one storage
            assert sent == [16, 16]
            z = y.exp()  # saves z
            z = z.mul_(2).exp()  # exp's result was written to: its version is another
            total = (c.sum() + z.sum()) * torch.tensor(2.0)  # a scalar stays
        total.backward()
    assert len(sent) == 4
    assert set(sent) == {16}
