"""`planner` on a machine that is not here: another host name and start of the kernel, another
clock, an invented GPU. All else is what a person runs: the command, the study, its storage.

    python -m tests.search.machines.elsewhere tune native:swin_tiny …

Its probes sleep, and the records are those of the invented table. What may be pretended:

    PRETEND_HOST     the machine's name
    PRETEND_CLOCK    seconds by which its clock is ahead
    PRETEND_GPU      the name of its GPU
    PRETEND_PROBE    seconds that a probe takes
    PRETEND_LEASE    seconds that a lease lasts
    PRETEND_OPTIONS  options added to the command's
    PRETEND_BEGUN    a file that receives a line for each probe begun: host, setting
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from planner.cli import main
from planner.core.schema import MeasurementRecord, Model
from search.loop.space import setting_id
from search.loop.strategies.strategy import Choice
from search.loop.study import lease, optuna_study
from search.tuning import tune as tuning
from tests.search.tables import GPU, make_record
from tests.search.tuner import pretend_gpu, pretend_no_estimate
from tests.undurable import write_without_waiting

HOST = os.environ.get("PRETEND_HOST", "here")


class InventedProber:
    """In place of the prober of a device: sleeps, and answers from the invented table."""

    fork_server = None

    def __init__(self, model: Model, *_: object, **__: object) -> None:
        self.model = model

    def __enter__(self) -> InventedProber:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __call__(self, choice: Choice, probe_id: str, deadline: float) -> MeasurementRecord:
        setting = choice.candidate.setting
        with Path(os.environ["PRETEND_BEGUN"]).open("a") as file:
            file.write(f"{HOST} {setting_id(setting)}\n")
        time.sleep(float(os.environ.get("PRETEND_PROBE", "0.02")))
        found = make_record(setting, model=self.model, device=here())  # type: ignore[arg-type]
        # A tenth of a second, so that a budget of minutes is no limit unless a test says so.
        return found.model_copy(update={"probe_seconds": 0.1})


def here() -> Any:
    return GPU.model_copy(update={"name": os.environ.get("PRETEND_GPU", GPU.name)})


def pretend() -> None:
    pretend_gpu()
    pretend_no_estimate()
    tuning.describe_device = lambda wanted: here()
    tuning.device_rates = lambda *_, **__: None
    tuning.DeviceProber = InventedProber
    lease.socket.gethostname = lambda: HOST
    lease._where_pids_hold = lambda: f"the kernel of {HOST}"
    ahead, clock = float(os.environ.get("PRETEND_CLOCK", "0")), time.time
    time.time = lambda: clock() + ahead
    if "PRETEND_LEASE" in os.environ:
        seconds = float(os.environ["PRETEND_LEASE"])
        optuna_study.LEASE_MARGIN_SECONDS = 0.0
        tuning.probe_deadline = lambda prior: lambda choice: seconds


if __name__ == "__main__":
    write_without_waiting()
    pretend()
    more = shlex.split(os.environ.get("PRETEND_OPTIONS", ""))
    raise SystemExit(main([*sys.argv[1:], *more]))
