"""The trainers there are. To add one: a file with a `TRAINER`, and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from planner.core.errors import unknown_name
from planner.trainers.accelerate import TRAINER as ACCELERATE
from planner.trainers.deepspeed import TRAINER as DEEPSPEED
from planner.trainers.lightning import TRAINER as LIGHTNING
from planner.trainers.microsoft import TRAINER as MICROSOFT
from planner.trainers.mmengine import TRAINER as MMENGINE
from planner.trainers.plan import Trainer
from planner.trainers.pytorch import TRAINER as PYTORCH
from planner.trainers.timm import TRAINER as TIMM
from planner.trainers.transformers import TRAINER as TRANSFORMERS

TRAINERS: Mapping[str, Trainer] = {
    trainer.name: trainer
    for trainer in (
        TIMM, TRANSFORMERS, ACCELERATE, LIGHTNING, MICROSOFT, DEEPSPEED, MMENGINE, PYTORCH,
    )
}  # fmt: skip
TARGETS = tuple(TRAINERS)


def find_trainer(name: str) -> Trainer:
    """The trainer that --for calls `name`. Raises UsageError."""
    if name not in TRAINERS:
        raise unknown_name("trainer", name, TRAINERS, f"Trainers: {', '.join(TRAINERS)}.")
    return TRAINERS[name]
