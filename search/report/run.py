"""What is known of a search: what it found, and every probe of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from planner.core.schema import MeasurementRecord
from planner.core.schema.result import Recommendation
from search.loop.contenders import Contender, choose, contenders
from search.report.wording import end_of


@dataclass(frozen=True)
class Probe:
    """A record with its number in the run, from 1 on, and how it ended."""

    number: int
    record: MeasurementRecord
    end: str

    @property
    def ran(self) -> bool:
        """Whether it has a rate and stayed within the budget."""
        return self.end == "measured" and self.record.images_per_second is not None


@dataclass(frozen=True)
class Run:
    """A search of settings: what was recommended (None while it runs), and every probe in the order
    they ended. `faults` say what of it could not be read.

    `tuners` say who made a probe, by its id, where the study was read.
    """

    folder: Path
    found: Recommendation | None
    records: tuple[MeasurementRecord, ...]
    faults: tuple[str, ...] = ()
    tuners: Mapping[str, str] = field(default_factory=dict)
    name: str = ""

    @property
    def title(self) -> str:
        return self.name or str(self.folder)

    @cached_property
    def budget_bytes(self) -> int | None:
        """What a setting may take by the search, as the newest probe was judged. None where no
        search asked."""
        asked = [r.allowed_bytes for r in (*self.cited, *reversed(self.records))]
        return next((n for n in asked if n is not None), None)

    @cached_property
    def cited(self) -> tuple[MeasurementRecord, ...]:
        """The records that the recommendation itself holds, each once."""
        if self.found is None:
            return ()
        held = (self.found.evidence, *self.found.runners_up, self.found.baseline)
        by_id = {repr(record): record for record in held if record is not None}
        return tuple(by_id.values())

    @cached_property
    def best(self) -> MeasurementRecord | None:
        """The recommendation's own measurement; while there is none, the best so far. None where
        nothing ran within the budget."""
        if self.found is not None and self.found.evidence is not None:
            return self.found.evidence
        found = self.contenders
        return choose(found).evidence if found else None

    @cached_property
    def contenders(self) -> list[Contender]:
        """The settings that ran within the budget."""
        return contenders(self.records, self.budget_bytes)

    @cached_property
    def unit(self) -> str:
        """What a batch counts: images, unless all records are of another task."""
        ran = [record for record in self.records if record.images_per_second]
        said = {record.counts for record in ran or self.records}
        return said.pop() if len(said) == 1 else "images"

    @cached_property
    def probes(self) -> list[Probe]:
        """The records with their numbers and how they ended."""
        return [
            Probe(number, record, end_of(record, self.budget_bytes))
            for number, record in enumerate(self.records, start=1)
        ]

    def proof(self, record: MeasurementRecord) -> str:
        """`probe 3`, as the table of probes numbers it; else by the start of its id."""
        known = (p.number for p in self.probes if p.record.probe_id == record.probe_id)
        return f"probe {next(known, record.probe_id[:8])}" if record.probe_id else "a probe"
