"""Looks at a device: each observation in a process of its own, with a deadline, told as a record.

Imports no torch and makes no CUDA context. Whatever happens to the process, the answer is a record
with the figures that it had told by then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from planner.memory.allocator_config import RECORDED_AS, environment_options
from planner.schema.observation import Observation, ObservationRecord
from search.probe.device import describe_device, versions, worker_environment
from search.probe.observation.order import WORKER_COMMAND, Hearer, Order
from search.probe.parent.supervised import run_supervised

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
    heard = Hearer()
    ended = run_supervised(
        WORKER_COMMAND,
        heard.hear,
        lambda: began + deadline_seconds,
        {**worker_environment(), **observation.environment},
        [order.model_dump_json()],
    )
    status, message = heard.status, heard.message
    if not status:
        status = "timed_out" if ended.late else "crashed"
        message = f"not done after {deadline_seconds:g} s" if ended.late else ended.words
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
