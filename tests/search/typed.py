"""`planner tune` over an invented device, as a process of its own that tests may signal.

    python -m tests.search.typed ARGUMENTS…

Its probes take 50 ms. With --wait the second one says so on standard error, waits for a signal, and
winds up: until the file is there that WINDS_UP_UNTIL names.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from planner.cli import main
from planner.core.schema import MeasurementRecord
from planner.core.units import GIB
from search.loop.space import Pick
from search.probe.device import MemoryInUse
from search.tuning import tune as tune_file
from search.tuning.tune import device_prior
from tests.search.tables import GPU, make_record
from tests.undurable import write_without_waiting


def pretend_gpu(change: Callable[[Any, str, Any], None] = setattr) -> None:
    """The device functions that `tune` asks, answered for a GPU of 16 GiB that is not there."""
    change(tune_file, "choose_device", lambda wanted: "cuda:0")
    change(tune_file, "describe_device", lambda wanted: GPU)
    change(tune_file, "least_free", lambda wanted: MemoryInUse(16 * GIB, 0, 16 * GIB))
    change(tune_file, "versions", lambda: {"torch": "test"})


class SlowProber:
    """In place of DeviceProber. It says what was measured before its worker has ended."""

    on_result: Any = None

    def __init__(self, model: Any, *_: Any, **__: Any) -> None:
        self.model, self.calls = model, 0

    def __enter__(self) -> SlowProber:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __call__(self, pick: Pick, probe_id: str, deadline_seconds: float) -> MeasurementRecord:
        self.calls += 1
        time.sleep(0.05)
        if self.calls == 2 and "--wait" in sys.argv:
            try:
                print("waiting", file=sys.stderr, flush=True)
                time.sleep(300)
            finally:
                with suppress(OSError):  # its terminal was closed
                    print("winding up", file=sys.stderr, flush=True)
                while not Path(os.environ.get("WINDS_UP_UNTIL", "/")).exists():
                    time.sleep(0.02)
        seed = Random(probe_id).randrange(99)
        record = make_record(pick.candidate.setting, seed=seed, model=self.model)
        if self.on_result is not None:
            self.on_result(record)
        return record


if __name__ == "__main__":
    write_without_waiting()
    pretend_gpu()
    # The guess of an unknown device: estimating took longer than all pretended probes.
    tune_file.device_prior = lambda space, model, device, _, *rest, **more: device_prior(
        space, model, device, None, *rest, **more
    )
    tune_file.DeviceProber = SlowProber  # type: ignore[misc, assignment]
    sys.exit(main(["tune", *(a for a in sys.argv[1:] if a != "--wait")]))
