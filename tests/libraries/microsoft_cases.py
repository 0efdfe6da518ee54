"""The models and settings on which the authors' Swin is compared, and their recorded facts.

There is no package of the authors' code, so its real module needs a checkout. What came of it on
fake tensors under CUDA's rules (torch 2.13) is in `data/microsoft.json`, to which the tests hold
the step on shapes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.core.schema import SwinConfig, TrainSetting
from planner.ledger.ledger import Allocated, Event, Freed, Marked, Scratch
from planner.libraries.microsoft.spec import PUBLISHED
from planner.libraries.registry import find_library
from planner.memory.caching_allocator import rounded
from tests.libraries.steps import Changes, setting_of

FACTS = Path(__file__).parent / "data" / "microsoft.json"

# 14x14 tokens in windows of 7, shifted, then 7x7, where the window covers the map.
SMALL: Changes = {
    "library": "microsoft", "image_size": 56, "depths": (2, 2), "num_heads": (1, 2),
    "embed_dim": 32, "num_classes": 10,
}  # fmt: skip
PLAIN: Changes = {"loss": "cross-entropy", "clip_grad": False}  # as the facts were recorded
PRECISIONS = ("fp32", "bf16", "fp16", "pure-bf16")
CHECKPOINTINGS = ("none", "blocks", "stages", "stages:1")
MODELS: tuple[Changes, ...] = (
    {"image_size": (56, 112)},  # 7x14 tokens in the second stage: two windows, not shifted
    {"image_size": (112, 168)},
    {"image_size": 24},  # 6x6 and 3x3 tokens: the windows shrink
    {"image_size": 64, "window_size": 4, "depths": (1, 2, 1), "num_heads": (1, 2, 4)},
    {"absolute_position_embedding": True, "qkv_bias": False},
    {"patch_norm": False},  # the patches' transposed layout goes on into the first block
    {"patch_norm": False, "image_size": 24, "mlp_ratio": 2.0},
    {"drop_rate": 0.1, "attn_drop_rate": 0.1, "drop_path_rate": 0.0},
    {"drop_path_rate": 0.3, "num_classes": 21841, "in_channels": 1},
)
SETTINGS: tuple[Changes, ...] = (
    {"batch_size": 1},
    {"batch_size": 1, "precision": "fp32"},
    {"batch_size": 5},
    {"batch_size": 1, "checkpointing": "blocks"},
    {"checkpointing": "blocks:3"},
    {"checkpointing": "blocks:every-2", "precision": "fp32"},
    {"checkpointing": "selective"},
    {"checkpointing": "selective", "precision": "fp32"},
    {"checkpointing": "selective", "precision": "pure-bf16", "accumulate": 2},
    {"accumulate": 2, "optimizer": "sgd"},
    {"accumulate": 2, "checkpointing": "blocks"},
    {"precision": "fp16", "clip_grad": True},
)
DROPPED: Changes = {"image_size": 112, "drop_rate": 0.1, "attn_drop_rate": 0.1}


@dataclass(frozen=True)
class Case:
    """One step of one model: what differs from SMALL and from `setting_of(PLAIN)`, or a name."""

    model: Changes
    setting: Changes

    @property
    def config(self) -> SwinConfig:
        if "name" in self.model:
            return PUBLISHED[self.model["name"]]
        return SwinConfig.model_validate({**SMALL, **self.model})

    @property
    def train_setting(self) -> TrainSetting:
        spec = find_library("microsoft")
        return spec.resolve(self.config, setting_of({**PLAIN, **self.setting}))

    @property
    def title(self) -> str:
        changes = {**self.model, **self.setting}
        return "-".join(f"{key}={value}".replace(" ", "") for key, value in changes.items())


SMALL_CASES: tuple[Case, ...] = tuple(
    Case({"version": swin, **model}, setting)
    for swin in (1, 2)
    for model, setting in (
        *(
            ({}, {"precision": precision, "checkpointing": checkpointing})
            for precision in PRECISIONS
            for checkpointing in CHECKPOINTINGS
        ),
        *((model, {}) for model in MODELS),
        *(({}, setting) for setting in SETTINGS),
        *(
            (DROPPED, {"precision": precision, "checkpointing": checkpointing})
            for precision, checkpointing in (("bf16", "blocks"), ("fp16", "stages"))
        ),
    )
)
PUBLISHED_CASES: tuple[Case, ...] = tuple(Case({"name": name}, {}) for name in PUBLISHED) + tuple(
    Case({"name": f"swin{suffix}"}, {"precision": precision, "checkpointing": checkpointing})
    for suffix in ("_tiny_patch4_window7_224", "v2_tiny_patch4_window8_256")
    for precision in PRECISIONS
    for checkpointing in CHECKPOINTINGS
    if (precision, checkpointing) != ("bf16", "none")
)


def facts_of(events: tuple[Event, ...], num_parameters: int) -> dict[str, Any]:
    """What is kept of two steps: (phase, step, live bytes at its end, peak live bytes in it)."""
    events = tuple(map(_as_recorded, events))
    built = next(i for i, e in enumerate(events) if isinstance(e, Marked) and e.phase == "build")
    return {
        "num_parameters": num_parameters,
        "num_allocations": sum(isinstance(event, Allocated) for event in events[built:]),
        "phase_ends": [list(end) for end in phase_ends(events)],
    }


def _as_recorded(event: Event) -> Event:
    """When the facts were recorded, what `roll` holds between its dimensions was no scratch."""
    if isinstance(event, Scratch) and event.label.startswith("aten.roll"):
        return Allocated(event.storage, event.sizes[0], event.label, event.path)
    return event


def phase_ends(events: Iterable[Event]) -> list[tuple[str, int, int, int]]:
    """(phase, step, live bytes at its end, peak live bytes in it)."""
    sizes: dict[int, int] = {}
    live = peak = 0
    ends = []
    for event in events:
        if isinstance(event, Allocated):
            sizes[event.storage] = rounded(event.num_bytes)
            live += sizes[event.storage]
            peak = max(peak, live)
        elif isinstance(event, Freed):
            live -= sizes.pop(event.storage, 0)  # scratch
        elif isinstance(event, Marked):
            ends.append((event.phase, event.step, live, peak))
            peak = live
    return ends[1:] if ends and ends[0][0] == "build" else ends


def read_facts() -> dict[str, Any]:
    """Case title to `facts_of` the real module."""
    return json.loads(FACTS.read_text())["facts"]
