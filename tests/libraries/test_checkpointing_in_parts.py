"""`blocks:K`, `blocks:every-N` and `selective`: in every library what torch does, to the byte.

The real module runs under `torch.utils.checkpoint` and, selective, under torch's own contexts of
selective checkpointing (more of it in `test_shapes.py`). Shown with torch 2.13.0.
"""

from __future__ import annotations

from typing import Any

import pytest

from planner.core.errors import UnsupportedError
from planner.core.schema import SwinConfig
from planner.ledger.ledger import Computed, Event, Marked
from planner.libraries.registry import find_library
from planner.step.training import record_training
from tests.libraries.steps import (
    assert_equal_to_torch,
    setting_of,
)

# 14x14 tokens in windows of 7, shifted, then 7x7, where the window covers the map.
SMALL: dict[str, Any] = {
    "image_size": 56, "depths": (2, 2), "num_heads": (3, 6), "embed_dim": 48, "num_classes": 10,
    "drop_path_rate": 0.2,
}  # fmt: skip


def small(library: str, version: int = 1, **fields: Any) -> SwinConfig:
    return SwinConfig.model_validate({**SMALL, "library": library, "version": version, **fields})


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


def test_a_bias_is_not_added_in_place_to_what_is_kept() -> None:
    """What enters the MLP is not contiguous here: torch adds the bias in place, but not beneath the
    modes of selective checkpointing, where gradients are those without."""
    import torch

    config = small("native", 2, patch_norm=False)
    asked = {"precision": "fp32", "attention": "eager", "batch_size": 3}
    assert_equal_to_torch(config, setting_of({**asked, "checkpointing": "selective"}))
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


def test_more_blocks_than_there_are() -> None:
    for library in ("native", "timm", "torchvision", "transformers", "microsoft"):
        with pytest.raises(UnsupportedError, match=r"has 4 blocks: checkpointing is blocks:5"):
            find_library(library).resolve(small(library), setting_of({"checkpointing": "blocks:5"}))
