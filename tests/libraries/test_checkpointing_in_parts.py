"""`blocks:K`, `blocks:every-N` and `selective`: in every library what torch does, to the byte.

The real module runs under `torch.utils.checkpoint` and, selective, under torch's own contexts of
selective checkpointing. Shown with torch 2.13.0; microsoft's needs a checkout.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from planner.core.errors import UnsupportedError
from planner.core.schema import SwinConfig
from planner.estimation.estimate import estimate
from planner.ledger.ledger import Computed, Event, Marked
from planner.libraries.registry import find_library
from planner.step.training import record_training
from tests.covering import covering
from tests.libraries.steps import (
    assert_equal_to_cpu,
    assert_equal_to_trace,
    name_of,
    require,
    setting_of,
)

# 14x14 tokens in windows of 7, shifted, then 7x7, where the window covers the map.
SMALL: dict[str, Any] = {
    "image_size": 56, "depths": (2, 2), "num_heads": (3, 6), "embed_dim": 48, "num_classes": 10,
    "drop_path_rate": 0.2,
}  # fmt: skip
LIBRARIES = ("native", "timm", "torchvision", "transformers", "microsoft")


def small(library: str, version: int = 1, **fields: Any) -> SwinConfig:
    return SwinConfig.model_validate({**SMALL, "library": library, "version": version, **fields})


SELECTIVE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"attn_drop_rate": 0.1, "drop_rate": 0.1}, {"attention": "sdpa"}),
    ({"attn_drop_rate": 0.1, "drop_rate": 0.1}, {"attention": "eager"}),
    ({"image_size": (60, 76)}, {"accumulate": 2, "clip_grad": True}),
    ({}, {"lora_rank": 4}),
    ({}, {"frozen_stages": 1, "batch_size": 5}),
]


@pytest.mark.parametrize(("library", "step"), covering(("native", "timm"), SELECTIVE), ids=name_of)
def test_a_selective_step(library: str, step: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Attention that drops out within its kernel is computed again; all else that draws is too."""
    require(library)
    fields, changes = step
    asked = setting_of({"checkpointing": "selective", **changes})
    assert_equal_to_trace(small(library, 1, **fields), asked)


@pytest.mark.parametrize(
    ("library", "version", "checkpointing"),
    covering(LIBRARIES, (1, 2), ("selective", "blocks:3")),
)
def test_real_tensors(library: str, version: int, checkpointing: str) -> None:
    require(library)
    import torch

    asked = {"precision": "fp32", "attention": "eager", "batch_size": 3}
    limit = torch.tensor(4.6)  # microsoft's version 2 takes its logarithm in every forward
    own = (lambda x: x if x.dim() else limit) if library == "microsoft" else torch.log
    with mock.patch.object(torch, "log", own):
        config = small(library, version)
        assert_equal_to_cpu(config, setting_of({**asked, "checkpointing": checkpointing}))


def computed(checkpointing: str, kind: str, **fields: Any) -> dict[str, int]:
    """FLOPs of operations of this kind in each phase of the second step."""
    config = small("native", **fields)
    spec = find_library("native")
    setting = spec.resolve(config, setting_of({"checkpointing": checkpointing}))
    ledger = record_training(spec.on_shapes(config, setting), config, setting)
    found: dict[str, int] = {}
    flops = 0
    event: Event
    for event in ledger.events:
        if isinstance(event, Computed) and event.kind == kind:
            flops += event.flops
        elif isinstance(event, Marked):
            found[event.phase], flops = flops, 0
    return found


def test_what_is_kept_is_not_computed_twice_and_the_rest_is() -> None:
    for kind in ("matmul", "attention"):
        none, selective = computed("none", kind), computed("selective", kind)
        assert none == selective
        assert computed("blocks", kind)["backward"] > none["backward"]
    none, selective = computed("none", "pointwise"), computed("selective", "pointwise")
    assert none["forward"] == selective["forward"]
    assert none["backward"] < selective["backward"]
    dropped = {"attn_drop_rate": 0.1}
    again = computed("selective", "attention", **dropped)["backward"]
    assert again == computed("blocks", "attention", **dropped)["backward"]


def test_each_saves_less_than_the_one_before() -> None:
    model = "native:swin_tiny"
    saved = [
        estimate(model, batch_size=32, checkpointing=way).saved_activation_bytes
        for way in ("none", "selective", "blocks:every-2", "blocks:2", "blocks")
    ]
    none, selective, every_other, first_two, blocks = saved
    assert blocks < every_other < none
    assert blocks < selective < none
    assert blocks < first_two < none


def test_a_bias_is_not_added_in_place_to_what_is_kept() -> None:
    """What enters the MLP is not contiguous here: torch adds the bias in place, but not beneath the
    modes of selective checkpointing, where gradients are those without."""
    import torch

    config = small("native", 2, patch_norm=False)
    asked = {"precision": "fp32", "attention": "eager", "batch_size": 3}
    assert_equal_to_cpu(config, setting_of({**asked, "checkpointing": "selective"}))
    spec = find_library("native")
    found = []
    for checkpointing in ("none", "selective"):
        torch.manual_seed(0)
        setting = spec.resolve(config, setting_of({**asked, "checkpointing": checkpointing}))
        module = spec.build(config, setting)
        torch.manual_seed(1)
        module(torch.randn(2, 3, 56, 56)).square().mean().backward()
        found.append([parameter.grad for parameter in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("library", ["native", "timm", "torchvision", "transformers", "microsoft"])
def test_more_blocks_than_there_are(library: str) -> None:
    with pytest.raises(UnsupportedError, match=r"has 4 blocks: checkpointing is blocks:5"):
        find_library(library).resolve(small(library), setting_of({"checkpointing": "blocks:5"}))
