"""One probe of a run, as its charts show it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from planner.report.settings import describe_setting
from planner.schema import MeasurementRecord
from search.report.wording import (
    bytes_text,
    end_text,
    expected_text,
    hover,
    rate_text,
    seconds_text,
    short,
    within_text,
)


@dataclass(frozen=True)
class Probe:
    """A record with its number in the run, from 1 on, and how it ended; `unit` is what its batch
    counts."""

    number: int
    record: MeasurementRecord
    end: str
    unit: str = "images"

    @property
    def ran(self) -> bool:
        """Whether it has a rate and stayed within the budget."""
        return self.end == "measured" and self.record.images_per_second is not None

    @property
    def kind(self) -> tuple[str, str, bool]:
        """What its mark shows: precision, checkpointing, whether blocks are compiled."""
        setting = self.record.setting
        return setting.precision, setting.checkpointing, setting.compile != "off"

    @cached_property
    def hover(self) -> str:
        """What stands beside the pointer: setting, rate and its interval, memory, compiling."""
        record = self.record
        rate = ""
        if record.images_per_second is not None:
            rate = f"{rate_text(record.images_per_second)} {self.unit}/s{within_text(record)}"
        compiling = record.compile_seconds
        return hover(
            [
                f"probe {self.number}: {describe_setting(record.setting)}",
                rate,
                f"memory {bytes_text(record.used_bytes)}",
                expected_text(record, self.unit),
                f"compiled in {seconds_text(compiling)}" if compiling else "",
                ""
                if self.end == "measured"
                else f"{end_text(self.end)} {short(record.message, 120)}",
                *(short(flag, 120) for flag in record.flags[:3]),
            ]
        )
