"""What people's logs said when a training ended, where they were published, and the right answer.

`reported.jsonl` holds the lines that matter of each, as they were written; `owner/name#1` is an
issue, a pull request or a thread of that repository. The others say whose words they are.
`public.jsonl` has those that were found after the signs were written anew, each with how it is
answered (`verdict`). `says` and `silent` are what the ways out must and must not say.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from planner.programs.explanation import LogReading

GIB, MIB = 1024**3, 1024**2


@dataclass(frozen=True)
class Reported:
    """`answer` is the kind that it was, None where no sign's or not known; `also` are kinds that
    the lines say beside it. `possible` and `missed` say how well it is answered today, `figures`
    what torch's message tells, in bytes."""

    source: str
    log: str
    answer: str | None
    also: tuple[str, ...] = ()
    possible: bool = False
    missed: bool = False
    healthy: bool = False
    figures: dict[str, int] = field(default_factory=dict)
    verdict: str = ""
    says: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()

    def outcome(self, reading: LogReading) -> str:
        """How a reading of `log` answers; anything claimed that is not so is "wrong"."""
        claimed = {kind for kind, found in reading.findings.items() if not found.to_tell}
        if claimed - {self.answer, *self.also}:
            return "wrong"
        if self.answer is None:
            return "out of kind" if not reading.findings else "offered as possible"
        if self.answer in claimed:
            return "right"
        return "right as possible" if self.answer in reading.findings else "missed"


def _read(name: str) -> list[Reported]:
    lines = Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()
    return [Reported(**json.loads(line)) for line in lines]


PUBLIC = _read("public.jsonl")
REPORTED = [*_read("reported.jsonl"), *PUBLIC]
MESSAGES = [reported for reported in REPORTED if reported.figures]
