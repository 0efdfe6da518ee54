"""The trainers there are. To add one: a `Trainer`, and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from planner.core.errors import unknown_name
from planner.trainers import scripts
from planner.trainers.microsoft import TRAINER as MICROSOFT
from planner.trainers.plan import Trainer
from planner.trainers.timm import TRAINER as TIMM

TRAINERS: Mapping[str, Trainer] = {
    trainer.name: trainer
    for trainer in (
        TIMM, scripts.TRANSFORMERS, scripts.ACCELERATE, scripts.LIGHTNING, MICROSOFT,
        scripts.DEEPSPEED_TRAINER, scripts.PYTORCH,
    )
}  # fmt: skip
TARGETS = tuple(TRAINERS)


def find_trainer(name: str) -> Trainer:
    """The trainer that --for calls `name`. Raises UsageError."""
    if name not in TRAINERS:
        raise unknown_name("trainer", name, TRAINERS, f"Trainers: {', '.join(TRAINERS)}.")
    return TRAINERS[name]
