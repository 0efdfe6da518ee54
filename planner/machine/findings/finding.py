"""One thing found: what was read, what it costs, and the next step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["fault", "warning", "note"]
Layer = Literal["driver", "card", "link", "torch", "libraries", "settings", "container", "host"]

# Worst first; layers from the metal up.
LEVELS: tuple[Level, ...] = ("fault", "warning", "note")
LAYERS: tuple[Layer, ...] = (
    "driver", "card", "link", "torch", "libraries", "settings", "container", "host",
)  # fmt: skip
UNKNOWN_COST = "unknown: it was not measured"
# The batch by which costs of copying and of shared memory are shown.
EXAMPLE_BATCH = "a batch of 128 fp32 pictures of 224 px"
EXAMPLE_BATCH_BYTES = 128 * 3 * 224 * 224 * 4


@dataclass(frozen=True)
class Finding:
    """`fault`: training cannot run, or its results cannot be trusted. `warning`: it is slower or
    smaller than it could be. `note`: worth knowing.

    `name` is the same on every machine; docs/troubleshooting.md has a row for each. `evidence` says
    what was read and from where, `cost` what it costs (sourced, derived, or "unknown"), `next_step`
    a command or an action, "" where nothing is to be done. `subject` names the card, if one.
    """

    level: Level
    layer: Layer
    name: str
    message: str
    evidence: str
    cost: str = ""
    next_step: str = ""
    subject: str = ""

    @property
    def rank(self) -> tuple[int, int]:
        return LEVELS.index(self.level), LAYERS.index(self.layer)
