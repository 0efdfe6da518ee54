"""What a study is: where probes are leased and kept, on disk (`OptunaStudy`) or in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from planner.core.errors import UsageError
from planner.core.schema import MeasurementRecord
from search.loop.space import Candidate
from search.loop.study.lease import Lease

STUDY_NAME = "planner"  # unless another is asked for
_REPLAYED = "replay-"  # what the ids of its probes begin with


class Study(Protocol):
    """All probes of one model on one device. Methods may raise StudyError."""

    def records(self) -> tuple[MeasurementRecord, ...]:
        """Every probe that ended."""

    def busy(self) -> set[str]:
        """Ids of settings that other tuners are probing now."""

    def lease(
        self, candidate: Candidate, seconds: float, repeat: int = 0,
        most: int | None = None,
    ) -> Lease | None:  # fmt: skip
        """The right to probe a candidate for so long; None where another tuner was first, or where
        `most` probes are made or begun in the whole study."""

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

    def lease(
        self, candidate: Candidate, seconds: float, repeat: int = 0,
        most: int | None = None,
    ) -> Lease | None:  # fmt: skip
        return Lease(candidate, f"{_REPLAYED}{len(self.kept)}", len(self.kept))

    def finish(self, lease: Lease, record: MeasurementRecord) -> None:
        self.kept.append(record)

    def release(self, lease: Lease, why: str) -> None:
        return None

    def save(self, records: Sequence[MeasurementRecord]) -> None:
        return None


def is_replayed(record: MeasurementRecord) -> bool:
    """Whether a record is one that a replay went through, of a probe made before."""
    return record.probe_id.startswith(_REPLAYED)


def refuse_replayed(records: Sequence[MeasurementRecord], path: Path) -> None:
    """A replay restamps what others measured, at other times or elsewhere: no search that measures
    goes on from that as from its own. Raises UsageError."""
    number = sum(map(is_replayed, records))
    if number:
        raise UsageError(
            f"{path} holds {number} probes that a replay went through, and a search that measures "
            "goes on only from probes of its own.",
            "Choose another --output, or remove that file.",
        )
