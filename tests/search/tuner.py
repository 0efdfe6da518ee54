"""A tuner over an invented device, as a process of its own that tests may kill.

    python -m tests.search.tuner DIRECTORY [STORAGE]

Its probes are real child processes that sleep; the records are those of the invented table.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

from planner.core.schema import MeasurementRecord
from planner.core.units import GIB
from search.loop.strategies.strategy import Choice
from search.probe.device import MemoryInUse
from search.tuning import tune as tune_file
from search.tuning.device_prior import device_prior
from tests.search.tables import GPU, MODEL, SMALL, make_record
from tests.undurable import write_without_waiting

BATCHES = (8, 16, 512)
RESTRICT = {**SMALL, "compile": ("off",)}


def probe(choice: Choice, probe_id: str, deadline_seconds: float) -> MeasurementRecord:
    """A probe that takes 10 to 40 ms in a process of its own."""
    subprocess.run(["sleep", str(0.01 + 0.03 * Random(probe_id).random())], check=True)
    return make_record(choice.candidate.setting)


def pretend_gpu() -> None:
    """The device functions that `tune` asks, answered for a GPU that is not there."""
    tune_file.choose_device = lambda wanted: "cuda:0"
    tune_file.describe_device = lambda wanted: GPU
    tune_file.least_free = lambda wanted: MemoryInUse(16 * GIB, 0, 16 * GIB)
    tune_file.versions = lambda: {"torch": "test"}


def pretend_no_estimate() -> None:
    """The guess of an unknown device: estimating took longer than all pretended probes."""
    tune_file.device_prior = lambda space, model, device, _, *rest, **more: device_prior(
        space, model, device, None, *rest, **more
    )


def main(directory: Path, storage: str | None) -> None:
    pretend_gpu()
    found = tune_file.tune(
        MODEL, output=directory, storage=storage, restrict=RESTRICT, batch_size=BATCHES,
        strategy="exhaustive", baseline=False, estimator=None, prober=probe, budget_seconds=None,
    )  # fmt: skip
    print(found.status, found.num_probes)


if __name__ == "__main__":
    write_without_waiting()
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
