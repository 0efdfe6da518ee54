"""Traces in processes of their own, so that the one that asks imports no torch: both its sides.

The asker writes a line of JSON for each request; the tracer answers each with a line, as it goes.
"""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from queue import Empty, Queue
from tempfile import TemporaryFile
from typing import IO

from pydantic import BaseModel

from planner.core.collector import collect_once
from planner.core.errors import PlannerError
from planner.core.schema import Model, ResolvedSetting, TrainSetting
from planner.ledger.cache import decode, encode
from planner.ledger.key import ANY_BATCH
from planner.machine.hardware.processor import usable_cores
from planner.trace.kept_step import TracedStep, traced_step

Missing = Sequence[tuple[TracedStep, int]]
MAX_TRACERS = 4  # each imports torch: a ViT-B's takes 880 MiB


class Request(BaseModel):
    """A step to trace at a batch."""

    model: Model
    setting: TrainSetting
    batch_size: int
    is_fresh: bool


class Answer(BaseModel):
    """What has come of a request: the content of a cache file for each batch that has one."""

    parts: dict[int, str]


def trace_elsewhere(
    missing: Missing, tell: Callable[[int], None], limit_seconds: float | None = None
) -> int:
    """Traces each step at its batch, in other processes, and hands the step what it found: by the
    end of `limit_seconds`, which ends the processes. `tell` hears how many are done. Returns how
    many were not, by then."""
    end = time.monotonic() + (limit_seconds or threading.TIMEOUT_MAX)
    by_step: dict[int, list[tuple[TracedStep, int]]] = {}
    for step, batch in missing:  # all batches of a step by one tracer: the first may answer all
        by_step.setdefault(id(step), []).append((step, batch))
    steps = list(by_step.values())
    count = max(1, min(len(steps) // 2, usable_cores(), MAX_TRACERS))
    said: Queue[tuple[_Tracer, bytes]] = Queue()
    tracers: list[_Tracer] = []
    num_done = 0
    try:
        tracers += (_Tracer(list(chain(*steps[first::count])), said) for first in range(count))
        running = set(tracers)
        with suppress(Empty):
            while running:
                tracer, line = said.get(timeout=max(0, end - time.monotonic()))
                if tracer.hear(line):
                    num_done += 1
                    tell(num_done)
                elif not line:
                    running.remove(tracer)
    finally:
        for tracer in tracers:
            tracer.process.kill()
            tracer.process.wait()
    for tracer in tracers:
        ended = f"ended with status {tracer.process.returncode}"
        if tracer in running:
            ended = f"was not done after {limit_seconds:.0f} s, and was ended"
        for step, batch in tracer.waiting:
            step.held[batch] = PlannerError(
                f"the process that traced {step.model.title} {ended}.",
                "What it said last is above; 'planner tune' measures without a trace.",
            )
    return sum(len(tracer.waiting) for tracer in running)


class _Tracer:
    """A process that traces `waiting`, one after the other; what it writes is put into `said`, line
    by line, and b"" at its end."""

    def __init__(self, waiting: Missing, said: Queue[tuple[_Tracer, bytes]]) -> None:
        self.waiting = deque(waiting)
        path = os.pathsep.join(p for p in sys.path if p)
        with TemporaryFile() as asked:
            for s, batch in waiting:
                request = Request(
                    model=s.model, setting=s.setting, batch_size=batch, is_fresh=s.is_fresh
                )
                asked.write(f"{request.model_dump_json()}\n".encode())
            asked.seek(0)
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "planner.trace.process"],
                stdin=asked,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is for the asker, who ends this one
            )
        threading.Thread(target=self._read, args=(said,), daemon=True).start()

    def _read(self, said: Queue[tuple[_Tracer, bytes]]) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as answers:
            for line in answers:
                said.put((self, line))
        self.process.wait()
        said.put((self, b""))

    def hear(self, line: bytes) -> bool:
        """Whether a line is an answer: one that is whole. The step that it is of is handed it."""
        if not line.endswith(b"\n"):
            return False
        step, _ = self.waiting.popleft()
        for batch, text in Answer.model_validate_json(line).parts.items():
            kept = decode(base64.b64decode(text), {})
            assert kept is not None, "encoded by this very code"
            step.held[batch] = kept
        return True


def _answer(request: Request) -> Answer:
    step = traced_step(request.model, ResolvedSetting(request.setting))
    step.is_fresh = request.is_fresh
    step.record(request.batch_size)
    batches = {ANY_BATCH, request.batch_size} & set(step.held)
    return Answer(parts={b: base64.b64encode(encode({}, step.held[b])).decode() for b in batches})


def main() -> None:
    """Answers the requests on standard input. What a model prints goes to standard error."""
    collect_once()
    answers: IO[str] = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        print(
            _answer(Request.model_validate_json(line)).model_dump_json(), file=answers, flush=True
        )


if __name__ == "__main__":
    main()
