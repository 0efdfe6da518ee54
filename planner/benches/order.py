"""What crosses between the command and the process that times: one JSON argument, JSON lines back.

Imports no torch.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from planner.schema.bench import BenchCase, BenchOutcome

DEADLINE_SECONDS, COMPILED_DEADLINE_SECONDS = 90.0, 420.0
# Its arguments are the file descriptor to answer on and the order.
WORKER_COMMAND = (sys.executable, "-P", "-m", "planner.benches.worker")


class Order(BaseModel):
    """Time `cases` in turn on `device` ("cpu", "cuda:N"), each within `deadline_seconds` (None:
    what `deadline_of` gives it).

    Timing a case ends once the median is known to ±`median_precision` (95%), and after
    `max_measure_seconds` in any case.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cases: tuple[BenchCase, ...]
    device: str
    deadline_seconds: Annotated[float, Field(gt=0)] | None = None
    median_precision: Annotated[float, Field(gt=0)] = 0.01
    max_measure_seconds: Annotated[float, Field(gt=0)] = 3.0

    def deadline_of(self, case: BenchCase) -> float:
        """Seconds: compiling attention takes a minute on two busy cores."""
        usual = COMPILED_DEADLINE_SECONDS if case.is_compiled else DEADLINE_SECONDS
        return self.deadline_seconds or usual


class Answer(BaseModel):
    """Case `number` of the order has come to `phase`; or ended, with `outcome`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    phase: str = ""
    outcome: BenchOutcome | None = None


class Teller:
    """The worker's voice."""

    def __init__(self, result_fd: int) -> None:
        self._fd = result_fd

    def say(self, answer: Answer) -> None:
        line = answer.model_dump_json(exclude_defaults=True).encode() + b"\n"
        while line:
            line = line[os.write(self._fd, line) :]


def read_answers(data: bytes) -> tuple[list[Answer], bytes]:
    """The answers of whole lines, and the rest; what is none is passed over."""
    *lines, rest = data.split(b"\n")
    answers = []
    for line in lines:
        try:
            answers.append(Answer.model_validate_json(line))
        except ValidationError:
            continue
    return answers, rest
