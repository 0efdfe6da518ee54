"""Each library's Swin on shapes is its real module under torch's own CUDA code, to the byte.

Shown with torch 2.14.1 and timm 1.0.31. Few cases, each of
several changes: together they show each version, attention, precision and kind of checkpointing,
and what else of a model changes the events.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from planner.core.schema import SwinConfig
from planner.estimation.ledgers import step_ledger
from planner.ledger.ledger import Allocated, Event, Freed, PhaseEnded, Scratch
from planner.libraries.names import find_library
from planner.memory.caching_allocator import round_request
from planner.step.training import run_on_shapes
from tests.steps import Changes, assert_equal_to_torch, name_of, on_shapes, require, setting_of

# 14x14 tokens in windows of 7, shifted, then 7x7, where the window covers the map.
SMALL: Changes = {
    "image_size": 56, "depths": (2, 1), "num_heads": (2, 4), "embed_dim": 32, "num_classes": 10,
}  # fmt: skip
DROPPING: Changes = {"drop_rate": 0.1, "attn_drop_rate": 0.1}
PADDED: Changes = {"image_size": (60, 76)}  # 15 x 19 tokens

# Library, version, model, setting.
CASES: list[tuple[str, int, Changes, Changes]] = [
    ("native", 1, {"qkv_bias": False},
     {"attention": "sdpa", "precision": "fp16", "checkpointing": "selective",
      "zero_grad_to_none": False}),
    ("native", 2, {**PADDED, **DROPPING, "patch_norm": False, "depths": (2,), "num_heads": (2,)},
     {"attention": "sdpa", "checkpointing": "blocks", "batch_size": 5, "accumulate": 2}),
    ("native", 2, {"absolute_position_embedding": True, "image_size": (40, 104),
                   "window_size": (5, 4), "mlp_ratio": 2.0, "in_channels": 1},
     {"attention": "eager", "precision": "pure-bf16", "checkpointing": "stages:0"}),
    ("native", 1, {**DROPPING, "depths": (1, 2)},
     {"attention": "eager", "precision": "fp32", "checkpointing": "blocks:2", "batch_size": 1,
      "memory_format": "channels_last", "frozen_stages": 1}),
    # Attention that drops out within its kernel is computed again; all else that draws is too.
    ("native", 1, {**DROPPING, "depths": (1, 1)},
     {"attention": "sdpa", "checkpointing": "selective"}),
    ("timm", 1, {"depths": (2,), "num_heads": (2,)},
     {"checkpointing": "selective", "lora_rank": 4}),
    ("timm", 1, {**PADDED, **DROPPING, "drop_path_rate": 0.0},
     {"attention": "eager", "precision": "fp16", "checkpointing": "stages:1"}),
    ("timm", 1, {"image_size": (56, 112), "depths": (1, 2), "drop_path_rate": 0.3,
                 "num_classes": 21841, "in_channels": 1},
     {"attention": "sdpa", "checkpointing": "blocks", "batch_size": 1, "clip_grad": True}),
    ("timm", 2, {"image_size": 58, "window_size": 5, "qkv_bias": False,
                 "pretrained_window_size": (4, 2)},
     {"precision": "pure-bf16", "checkpointing": "selective", "memory_format": "channels_last"}),
]  # fmt: skip


def small(library: str, version: int, changes: Changes) -> SwinConfig:
    return SwinConfig.model_validate({**SMALL, "library": library, "version": version, **changes})


@pytest.mark.parametrize(("library", "version", "model", "setting"), CASES, ids=name_of)
def test_a_step(library: str, version: int, model: Changes, setting: Changes) -> None:
    require(library)
    assert_equal_to_torch(small(library, version, model), setting_of(setting))


PUBLISHED = [
    ("native", "swin_tiny"), ("native", "swinv2_base"),
    ("timm", "swin_s3_tiny_224"), ("timm", "swinv2_base_window12_192"),
]  # fmt: skip


@pytest.mark.release
@pytest.mark.parametrize(("library", "name"), PUBLISHED)
def test_published_models(library: str, name: str) -> None:
    require(library)
    config = find_library(library).published[name]
    assert_equal_to_torch(config, setting_of({}))


# `selective` checkpointing: what is computed again, and what torch does, to the byte.


def computed(checkpointing: str, kind: str, **fields: Any) -> dict[str, int]:
    """FLOPs of operations of this kind in each phase of the steady step."""
    config = small("native", 1, fields)
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
    modes of selective checkpointing."""
    config = small("native", 2, {"patch_norm": False})
    changes = {"precision": "fp32", "attention": "eager", "checkpointing": "selective"}
    assert_equal_to_torch(config, setting_of({**changes, "batch_size": 3}))


# The authors' own Swin v1 and v2 on shapes are the real modules, event by event. No package has
# their code: `data/microsoft.json` holds what came of it on fake tensors under CUDA's rules (torch
# 2.13.0, commit f82860b).

RECORDED = json.loads((Path(__file__).parent / "data" / "microsoft.json").read_text())["steps"]


@pytest.mark.parametrize(
    "is_published", [False, pytest.param(True, marks=pytest.mark.release)], ids=str
)
def test_the_authors_steps(is_published: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.step.pointwise.torch_version", lambda: (2, 13))  # of the facts
    spec, number = find_library("microsoft"), 0
    for step in (step for step in RECORDED if ("name" in step["model"]) == is_published):
        name = step["model"].get("name")
        config = spec.published[name] if name else SwinConfig(library="microsoft", **step["model"])
        setting = spec.resolve(config, setting_of(step["setting"]))
        build = on_shapes(config, setting)
        ledger = run_on_shapes(build, config, setting, in_place_sums=False)
        assert ledger.num_parameters == step["num_parameters"], step
        built = next(i for i, e in enumerate(ledger.events) if isinstance(e, PhaseEnded))
        events = list(map(as_recorded, ledger.events))
        num_allocations = sum(isinstance(event, Allocated) for event in events[built:])
        assert num_allocations == step["num_allocations"], step
        assert phase_ends(events)[1:] == step["phase_ends"], step
        number += 1
    assert number > 50


def as_recorded(event: Event) -> Event:
    """When the facts were recorded, what `roll` holds between its dimensions was no scratch."""
    if isinstance(event, Scratch) and event.label.startswith("aten.roll"):
        return Allocated(event.storage, event.sizes[0], event.label, event.path)
    return event


def phase_ends(events: list[Event]) -> list[list[Any]]:
    """[phase, step, live bytes at its end, peak live bytes in it]."""
    sizes: dict[int, int] = {}
    live = peak = 0
    ends = []
    for event in events:
        if isinstance(event, Allocated):
            sizes[event.storage] = round_request(event.num_bytes)
            live += sizes[event.storage]
            peak = max(peak, live)
        elif isinstance(event, Freed):
            live -= sizes.pop(event.storage, 0)  # scratch
        elif isinstance(event, PhaseEnded):
            ends.append([event.phase, event.step, live, peak])
            peak = live
    return ends
