"""Looks at a device: each observation in a process of its own, with a deadline, told as a record.

Imports no torch and makes no CUDA context. Whatever happens to the process, the answer is a record
with the figures that it had told by then.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from planner.memory.allocator_config import RECORDED_AS, environment_options
from planner.schema.observation import Observation, ObservationRecord
from search.probe.device import describe_device, versions, worker_environment
from search.probe.failure import last_words
from search.probe.observation.order import WORKER_COMMAND, Hearer, Order
from search.probe.parent import supervisor

# How long the kernel may take to end killed processes before they are given up on.
_KILL_SECONDS = 15.0
_READ_BYTES = 1 << 16
# What fails is looked at once more by the next run, and no more.
TRIES = 2


def remaining_observations(
    wanted: Sequence[Observation], records: Iterable[ObservationRecord], device_name: str
) -> list[Observation]:
    """Those of `wanted` that were not seen on the device called `device_name` yet.

    What this device cannot show is settled; a rehearsal settles nothing, nor does what the budget
    ended. A failure settles an observation the second time.
    """
    failures: dict[str, int] = {}
    done = set()
    for record in records:
        if record.rehearsal or record.cut_short or record.device.name != device_name:
            continue
        name = record.observation
        failures[name] = failures.get(name, 0) + (record.status not in ("seen", "not_here"))
        if record.status in ("seen", "not_here") or failures[name] >= TRIES:
            done.add(name)
    return [observation for observation in wanted if observation.name not in done]


def observe(
    observation: Observation,
    device: str,
    deadline_seconds: float,
    folder: Path,
    rehearsal: bool = False,
) -> ObservationRecord:
    """Look once. Files that an observation keeps go to `folder`.

    Raises UsageError where there is no such device.
    """
    described = describe_device(device)
    known = versions()
    options = environment_options({**os.environ, **observation.environment})
    if options is not None:
        known[RECORDED_AS] = options[1]
    date = datetime.now(UTC).isoformat(timespec="seconds")
    began = time.monotonic()
    order = Order(observation=observation, device=device, folder=str(folder))
    heard, words, late = _run(order, deadline_seconds)
    status, message = heard.status, heard.message
    if not status:
        status = "timed_out" if late else "crashed"
        message = f"not done after {deadline_seconds:g} s" if late else words
    return ObservationRecord.model_validate(
        {
            "observation": observation.name,
            "see": observation.see,
            "what": observation.what,
            "model": observation.model,
            "setting": observation.setting,
            "environment": observation.environment,
            "device": described,
            "versions": known,
            "date": date,
            "status": status,
            "message": message,
            "figures": heard.figures,
            "not_here": heard.not_here,
            "seconds": round(time.monotonic() - began, 3),
            "rehearsal": rehearsal,
        }
    )


def _run(order: Order, deadline_seconds: float) -> tuple[Hearer, str, bool]:
    """What the process said, its last words on standard error, and whether it was late."""
    deadline = time.monotonic() + deadline_seconds
    heard = Hearer()
    lifeline_theirs, lifeline = os.pipe()
    status, status_theirs = os.pipe()
    result, result_theirs = os.pipe()
    theirs = (lifeline_theirs, status_theirs, result_theirs)
    command = [*WORKER_COMMAND, str(result_theirs), order.model_dump_json()]
    with tempfile.TemporaryFile() as output, contextlib.ExitStack() as stack:
        for fd in (status, result):
            stack.callback(os.close, fd)
        try:
            process = subprocess.Popen(
                [sys.executable, "-S", "-E", supervisor.__file__,
                 str(lifeline_theirs), str(status_theirs), *command],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=theirs,
                start_new_session=True,
                env={**worker_environment(), **order.observation.environment},
            )  # fmt: skip
        except BaseException:
            os.close(lifeline)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        try:
            ended = _listen({status: None, result: heard}, deadline)
        finally:
            os.close(lifeline)  # the supervisor ends all that still runs
        if not ended:
            _listen({status: None, result: heard}, time.monotonic() + _KILL_SECONDS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_SECONDS)
        output.seek(0)
        words = last_words(output.read().decode(errors="replace"))
    return heard, words, not ended


def _listen(channels: dict[int, Hearer | None], deadline: float) -> bool:
    """Hear until every channel has ended; False where the deadline came first."""
    with selectors.DefaultSelector() as selector:
        for fd in channels:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            for key, _ in selector.select(left):
                data = os.read(key.fd, _READ_BYTES)
                hearer = channels[key.fd]
                if not data:
                    selector.unregister(key.fd)
                elif hearer is not None:
                    hearer.hear(data)
    return True
