"""What a search may use: probes, and seconds of its own and of each probe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.core.schema import MeasurementRecord
from search.loop.space import Choice
from search.loop.surrogate.costs import compilation_of

if TYPE_CHECKING:
    from search.loop.surrogate.prior import Prior

# A probe that takes longer than all of this is hung: imports and building took under a minute on
# the slowest machine seen, compiling five times its guess.
START_SECONDS = 120.0
TIMING_SECONDS = 60.0
PROBES_SHARE = 0.5  # of the budget, that is left for probes however long their preparation took
STEPS_TO_WAIT = 8  # two of warm-up, three timed, and some for a guess that is too low


@dataclass
class Limits:
    """What a search may use: probes in the whole study, and seconds by `clock`. `spent_seconds` is
    what the study's probes by others took, before this tuner and beside it."""

    trials: int | None = None
    budget_seconds: float | None = None
    spent_seconds: float = 0.0
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.started = self.clock()
        self.charged: set[str] = set()

    def begin_probing(self) -> None:
        """Counts no more of what was until now than leaves probes their share: on a busy machine
        to import and to estimate takes most of a minute."""
        if self.budget_seconds is not None:
            most = (1 - PROBES_SHARE) * self.budget_seconds
            self.started = max(self.started, self.clock() - most)

    def charge(self, records: Iterable[MeasurementRecord]) -> None:
        """Counts what probes of others took, each once."""
        for record in records:
            if record.probe_id not in self.charged:
                self.charged.add(record.probe_id)
                self.spent_seconds += record.probe_seconds

    def seconds_left(self) -> float | None:
        """Seconds to the hard deadline; None: no limit."""
        if self.budget_seconds is None:
            return None
        used = self.clock() - self.started + self.spent_seconds
        return max(self.budget_seconds - used, 0.0)


def probe_deadline(prior: Prior) -> Callable[[Choice], float]:
    """Seconds after which a probe is hung and not slow, by the prior's guesses."""

    def deadline(choice: Choice) -> float:
        compiling = 5 * compilation_of(choice.candidate.setting).guess(prior.compile_seconds)
        rate = choice.expected_rate
        stepping = STEPS_TO_WAIT * choice.candidate.images / rate if rate else 0.0
        return START_SECONDS + TIMING_SECONDS + compiling + 2 * min(stepping, 3600.0)

    return deadline
