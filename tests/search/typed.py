"""`planner tune` over an invented device, as a process of its own that tests may signal.

    python -m tests.search.typed ARGUMENTS…

Its probes take 50 ms. With --wait the second one says so on standard error, waits for a signal, and
takes half a second to wind up.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from random import Random
from typing import Any

from planner.cli import main
from planner.core.schema import MeasurementRecord
from search.loop.strategies.strategy import Choice
from search.tuning import tune as tune_file
from tests.search.tables import make_record
from tests.search.tuner import pretend_gpu, pretend_no_estimate
from tests.undurable import write_without_waiting


class SlowProber:
    """In place of DeviceProber."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.calls = 0

    def __enter__(self) -> SlowProber:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __call__(self, choice: Choice, probe_id: str, deadline_seconds: float) -> MeasurementRecord:
        self.calls += 1
        time.sleep(0.05)
        if self.calls == 2 and "--wait" in sys.argv:
            try:
                print("waiting", file=sys.stderr, flush=True)
                time.sleep(600)
            finally:
                with suppress(OSError):  # its terminal was closed
                    print("winding up", file=sys.stderr, flush=True)
                time.sleep(0.5)
        return make_record(choice.candidate.setting, seed=Random(probe_id).randrange(99))


if __name__ == "__main__":
    write_without_waiting()
    pretend_gpu()
    pretend_no_estimate()
    tune_file.DeviceProber = SlowProber  # type: ignore[misc, assignment]
    tune_file.device_rates = lambda *_: None  # type: ignore[assignment]
    sys.exit(main(["tune", *(a for a in sys.argv[1:] if a != "--wait")]))
