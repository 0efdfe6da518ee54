"""`planner` on a machine that is not here: another host name, an invented GPU. All else is what a
person runs: the command, the study, its storage.

    python -m tests.search.machines.elsewhere tune native:swin_tiny …

The records are those of the invented table. What may be pretended:

    PRETEND_HOST     the machine's name
    PRETEND_OPTIONS  options added to the command's
    PRETEND_BEGUN    a file that receives a line for each probe begun: host, setting
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path

from planner.cli import main
from planner.core.schema import MeasurementRecord, Model
from search.loop import study
from search.loop.space import Choice, setting_id
from search.tuning import tune as tuning
from tests.search.tables import make_record
from tests.search.typed import pretend_gpu, pretend_no_estimate
from tests.undurable import write_without_waiting

HOST = os.environ.get("PRETEND_HOST", "here")


class InventedProber:
    """In place of the prober of a device."""

    fork_server = None
    on_result = None

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
        time.sleep(0.02)  # so that others have their turn
        found = make_record(setting, model=self.model)  # type: ignore[arg-type]
        return found.model_copy(update={"probe_seconds": 0.1})


def pretend() -> None:
    pretend_gpu()
    pretend_no_estimate()
    tuning.device_rates = lambda *_, **__: None
    tuning.DeviceProber = InventedProber
    study.gethostname = lambda: HOST


if __name__ == "__main__":
    write_without_waiting()
    pretend()
    more = shlex.split(os.environ.get("PRETEND_OPTIONS", ""))
    raise SystemExit(main([*sys.argv[1:], *more]))
