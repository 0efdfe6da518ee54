"""What a strategy is: asked for a candidate to probe, told what its probe found."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, Protocol

from planner.core.schema import MeasurementRecord
from search.loop.space import Candidate

# "finalists": what was disturbed, once more; or the best, with other options of the allocator.
Phase = Literal["calibrate", "search", "finalists", "baseline"]

# Stop when no probe is expected to gain more than that share: a judgement. Until all of them
# together gain less, 24 simulated devices took 20 probes for 11, and lost 0.7% for 0.9%.
TOLERANCE = 0.01


@dataclass(frozen=True)
class Choice:
    """A candidate to probe, in which phase, and the rate below which it cannot win."""

    candidate: Candidate
    phase: Phase = "search"
    expected_rate: float | None = None
    give_up_images_per_second: float | None = None


@dataclass(frozen=True)
class Situation:
    """What a strategy may count on: seconds left (None: no limit), and which settings it may not
    ask for now."""

    seconds_left: float | None = None
    busy: Collection[str] = ()


class Strategy(Protocol):
    """Asked for the next probe until it has none; told of every probe, its own and others'."""

    @property
    def stopped_because(self) -> str: ...

    def ask(self, situation: Situation) -> Choice | None:
        """The next probe, or None (then `stopped_because` says why)."""

    def tell(self, candidate: Candidate, record: MeasurementRecord) -> None:
        """What the probe of a candidate found. May come for candidates that were never asked."""
