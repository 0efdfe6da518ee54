"""The phases of an optimizer step, as a probe goes through them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class StepPhases:
    """Names the phase that is running, told of each that has ended. `announce` hears each begin."""

    accumulate: int = 1
    announce: Callable[[str], None] | None = None
    current: str = "forward"
    _micro_steps: int = 0

    def __call__(self, ended: str) -> None:
        self.current = self._next(ended)
        if self.announce is not None:
            self.announce(self.current)

    def _next(self, ended: str) -> str:
        if ended == "forward":
            return "backward"
        if ended == "backward":
            self._micro_steps += 1
            return "forward" if self._micro_steps < self.accumulate else "optimizer"
        self._micro_steps = 0
        return "zero_grad" if ended == "optimizer" else "forward"
