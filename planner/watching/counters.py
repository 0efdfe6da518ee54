"""What a training has done between two instants: steps, images, waits. Host clock only."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass
class Count:
    """Sums over a span of time. `paused_seconds` are not training (validation, checkpoints), and
    `wait_seconds` what the loop waited for batches, where a loader is watched."""

    steps: int = 0
    micro_steps: int = 0
    images: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    paused_seconds: float = 0.0

    @property
    def training_seconds(self) -> float:
        return max(self.seconds - self.paused_seconds, 0.0)

    @property
    def images_per_second(self) -> float | None:
        return (
            self.images / self.training_seconds if self.images and self.training_seconds else None
        )

    @property
    def step_seconds(self) -> float | None:
        return self.training_seconds / self.steps if self.steps else None

    @property
    def images_per_step(self) -> float | None:
        return self.images / self.steps if self.steps and self.images else None

    def wait_share(self, is_timed: bool) -> float | None:
        """Of the training's time; None where no loader is watched."""
        if not is_timed or not self.training_seconds:
            return None
        return min(self.wait_seconds / self.training_seconds, 1.0)

    def add(self, other: Count) -> None:
        for summed in fields(self):
            total = getattr(self, summed.name) + getattr(other, summed.name)
            setattr(self, summed.name, total)

    def to_json(self, is_timed: bool) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "micro_steps": self.micro_steps,
            "images": self.images or None,
            "images_per_second": self.images_per_second,
            "step_seconds": self.step_seconds,
            "wait_share": self.wait_share(is_timed),
            "paused_seconds": self.paused_seconds or None,
        }
