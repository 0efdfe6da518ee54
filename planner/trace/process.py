"""Traces in a process of their own, so that the one that asks imports no torch: both its sides.

The asker writes a line of JSON for each request; the tracer answers each with a line, as it goes.
"""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from tempfile import TemporaryFile
from typing import IO

from pydantic import BaseModel

from planner.core.errors import PlannerError
from planner.core.schema import Model, ResolvedSetting, TrainSetting
from planner.ledger.cache import decode, encode
from planner.ledger.key import ANY_BATCH
from planner.trace.kept_step import TracedStep, traced_step

Missing = Sequence[tuple[TracedStep, int]]


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
    missing: Missing, say: Callable[[str], None], limit_seconds: float | None = None
) -> None:
    """Traces each step at its batch, in one other process, and hands the step what it found: by the
    end of `limit_seconds`, which ends the process. `say` hears of each that is done and not the
    last."""
    requests = [
        Request(model=s.model, setting=s.setting, batch_size=batch, is_fresh=s.is_fresh)
        for s, batch in missing
    ]
    text = "".join(f"{request.model_dump_json()}\n" for request in requests)
    lines: list[bytes] = []

    def hear(line: bytes) -> None:
        lines.append(line)
        if len(lines) < len(requests):
            say(f"{len(lines)} of {len(requests)} traces done.")

    ended = _ask(text.encode(), hear, limit_seconds)
    answers = [Answer.model_validate_json(line) for line in lines]
    for (step, _), answer in zip(missing, answers, strict=False):
        for batch, text in answer.parts.items():
            kept = decode(base64.b64decode(text), {})
            assert kept is not None, "encoded by this very code"
            step.held[batch] = kept
    for step, batch in missing[len(answers) :]:
        step.held[batch] = PlannerError(
            f"the process that traced {step.model.title} {ended}.",
            "What it said last is above; 'planner tune' measures without a trace.",
        )


def _ask(requests: bytes, hear: Callable[[bytes], None], limit_seconds: float | None) -> str:
    """`hear` gets each whole line that the tracer answers; how the tracer ended."""
    command = [sys.executable, "-m", "planner.trace.process"]
    path = os.pathsep.join(p for p in sys.path if p)
    environment = {**os.environ, "PYTHONPATH": path}
    with TemporaryFile() as asked:
        asked.write(requests)
        asked.seek(0)
        with subprocess.Popen(
            command, stdin=asked, stdout=subprocess.PIPE, env=environment
        ) as process:
            assert process.stdout is not None
            is_late = threading.Event()

            def end() -> None:
                is_late.set()
                process.kill()

            timer = threading.Timer(limit_seconds or threading.TIMEOUT_MAX, end)
            timer.daemon = True
            timer.start()
            try:
                for line in process.stdout:
                    if line.endswith(b"\n"):
                        hear(line)
                status = process.wait()
            finally:
                timer.cancel()
                process.kill()
    if is_late.is_set():
        return f"was not done after {limit_seconds:.0f} s, and was ended"
    return f"ended with status {status}"


def _answer(request: Request) -> Answer:
    step = traced_step(request.model, ResolvedSetting(request.setting))
    step.is_fresh = request.is_fresh
    step.record(request.batch_size)
    batches = {ANY_BATCH, request.batch_size} & set(step.held)
    return Answer(parts={b: base64.b64encode(encode({}, step.held[b])).decode() for b in batches})


def main() -> None:
    """Answers the requests on standard input. What a model prints goes to standard error."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the asker is interrupted too, and says so
    answers: IO[str] = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        print(
            _answer(Request.model_validate_json(line)).model_dump_json(), file=answers, flush=True
        )


if __name__ == "__main__":
    main()
