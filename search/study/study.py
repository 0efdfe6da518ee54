"""What a study is: where probes are leased and kept, on disk (`OptunaStudy`) or in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from planner.schema import MeasurementRecord
from search.space import Candidate
from search.study.lease import Lease

STUDY_NAME = "planner"  # unless another is asked for


class Study(Protocol):
    """All probes of one model on one device. Methods may raise StudyError."""

    def records(self) -> tuple[MeasurementRecord, ...]:
        """Every probe that ended."""

    def busy(self) -> set[str]:
        """Ids of settings that other tuners are probing now."""

    def lease(self, candidate: Candidate, seconds: float, repeat: int = 0) -> Lease | None:
        """The right to probe a candidate for so long; None where another tuner was first."""

    def finish(self, lease: Lease, record: MeasurementRecord) -> None:
        """Keeps the record of a leased probe."""

    def release(self, lease: Lease, why: str) -> None:
        """Gives a lease back whose probe did not end."""

    def save(self, records: Sequence[MeasurementRecord]) -> None:
        """Puts on disk what is not there yet."""


class MemoryStudy:
    """The study of a replay: nobody else is there, and nothing needs to survive."""

    def __init__(self) -> None:
        self.kept: list[MeasurementRecord] = []

    def records(self) -> tuple[MeasurementRecord, ...]:
        return tuple(self.kept)

    def busy(self) -> set[str]:
        return set()

    def lease(self, candidate: Candidate, seconds: float, repeat: int = 0) -> Lease | None:
        return Lease(candidate, f"replay-{len(self.kept)}", len(self.kept))

    def finish(self, lease: Lease, record: MeasurementRecord) -> None:
        self.kept.append(record)

    def release(self, lease: Lease, why: str) -> None:
        return None

    def save(self, records: Sequence[MeasurementRecord]) -> None:
        return None
