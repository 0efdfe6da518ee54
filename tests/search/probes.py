"""Requests for probes of `tests.search.factories`, small enough for a test."""

from typing import Any

from planner.core.schema import FactoryModel, TrainSetting
from search.probe.protocol import ProbeRequest

# Far beyond what any probe here takes: a deadline that is no part of the test.
AMPLE_SECONDS = 300.0
# What the factories take: said here, as they import torch.
CLASSES = 10
SIDE = 16


def request_of(factory: str, cap_bytes: int | None = None, **setting: Any) -> ProbeRequest:
    """A probe of a few steps of `tests.search.factories:factory`, fp32 at batch 4."""
    model = FactoryModel(
        factory=f"tests.search.factories:{factory}", image_size=(SIDE, SIDE), num_classes=CLASSES
    )
    return ProbeRequest(
        model=model,
        setting=TrainSetting(**{"batch_size": 4, "precision": "fp32", **setting}),
        memory_cap_bytes=cap_bytes,
        max_steps=5,
    )
