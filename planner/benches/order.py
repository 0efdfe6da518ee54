"""What crosses between the command and the process that times: one JSON argument, JSON lines back.

Imports no torch.
"""

from __future__ import annotations

import sys
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from planner.schema.bench import BenchCase, BenchOutcome
from search.probe.protocol import AnswerMessage, send

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


class Answer(AnswerMessage):
    """Case `number` of the order has come to `phase`; or ended, with `outcome`."""

    probe_id: str = ""
    number: int
    phase: str = ""
    outcome: BenchOutcome | None = None


class Teller:
    """The worker's voice."""

    def __init__(self, result_fd: int) -> None:
        self._fd = result_fd

    def say(self, answer: Answer) -> None:
        send(self._fd, answer.model_dump_json(exclude_defaults=True).encode() + b"\n")


ANSWERS = TypeAdapter(Answer)
