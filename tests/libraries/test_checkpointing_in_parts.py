"""`selective` checkpointing: what is computed again, and what torch does, to the byte.

The real module runs under `torch.utils.checkpoint` and, selective, under torch's own contexts of
selective checkpointing (more of it in `test_shapes.py`). Shown with torch 2.13.0.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from planner.core.schema import SwinConfig
from planner.estimation.ledgers import step_ledger
from planner.libraries.registry import find_library
from tests.libraries.steps import assert_equal_to_torch, setting_of

# 14x14 tokens in windows of 7, shifted, then 7x7, where the window covers the map.
SMALL: dict[str, Any] = {
    "image_size": 56, "depths": (2, 2), "num_heads": (3, 6), "embed_dim": 48, "num_classes": 10,
    "drop_path_rate": 0.2,
}  # fmt: skip


def small(version: int, **fields: Any) -> SwinConfig:
    return SwinConfig.model_validate({**SMALL, "version": version, **fields})


def computed(checkpointing: str, kind: str, **fields: Any) -> dict[str, int]:
    """FLOPs of operations of this kind in each phase of the steady step."""
    config = small(1, **fields)
    setting = find_library("native").resolve(config, setting_of({"checkpointing": checkpointing}))
    found = Counter[str]()
    for phase, operation in step_ledger(config, setting).operations():
        found[phase] += operation.flops * (operation.kind == kind)
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

    config = small(2, patch_norm=False)
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
