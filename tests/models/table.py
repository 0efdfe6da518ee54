"""Models that are recorded, beside torch's own probes of them on an emulated GPU.

    python -m tests.models.table                 all that tests/truth/models/models.yaml names
    python -m tests.models.table timm:resnet18 … these of them
    python -m tests.models.table --kept          nothing runs: what tests/truth/models keeps
    python -m tests.models.table --compiled      what models/compiled.yaml names, a minute each

Each step is a short probe on an emulated machine; what was recorded is not run again. It needs
torch's CUDA build and a C compiler. A model is equal where both peaks are those of the device to
within the rounding of an allocation, refused where the planner says why, else wrong. A compiled
step is within if both lie in the range that is stated of recorded compiled steps.
"""

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from planner.core.errors import PlannerError
from planner.core.schema import FactoryModel, MeasurementRecord
from planner.core.torch_version import torch_version
from planner.estimation.estimate import estimate
from planner.machine.emulated import EmulatedMachine, emulated_gpu, started
from planner.memory.compiled import RECORDED_BASIS
from search.loop.records import read_records
from tests.truth.matrix import Row, read_matrix
from tests.truth.record import measure

TRUTH = Path(__file__).parents[1] / "truth" / "models"
LISTED, COMPILED = TRUTH / "models.yaml", TRUTH / "compiled.yaml"
CARD = "a100-sxm-80gb"
WHATS = ("equal", "refused", "wrong")
EQUAL = 0.001  # a share of the peak: requests of less than 512 B are rounded in other places


class Verdict(NamedTuple):
    """One step: allocated and reserved bytes, (estimated - measured) / measured."""

    record: MeasurementRecord
    what: str
    allocated: float | None = None
    reserved: float | None = None
    said: str = ""


def records_path(compiled: bool) -> Path:
    folder = TRUTH / "compiled" if compiled else TRUTH
    return folder / f"{CARD}-torch-{'.'.join(map(str, torch_version()))}.jsonl"


def rows_of(models: Sequence[str], compiled: bool) -> list[Row]:
    """The rows of a list, or of those of its `models`."""
    rows = read_matrix(COMPILED if compiled else LISTED)
    return [row for row in rows if not models or row.model.title in models]


def library_of(row: Row | MeasurementRecord) -> str:
    return "own" if isinstance(row.model, FactoryModel) else row.model.library


def run(models: Sequence[str], path: Path, compiled: bool = False) -> None:
    """Carries the steps out that `path` does not hold, in a process that sees an emulated GPU."""
    command = [sys.executable, "-W", "ignore", "-m", f"{__package__}.table"]
    command += ["--here", "--record", str(path), *["--compiled"] * compiled]
    with started(EmulatedMachine((emulated_gpu(CARD),))) as environment:
        subprocess.run([*command, *models], env=environment, check=True)


def judge(record: MeasurementRecord) -> Verdict:
    """Of a step that was measured."""
    assert record.peak_allocated_bytes, record.message
    assert record.peak_reserved_bytes
    try:
        found = estimate(
            record.model, record.setting, gpu=CARD, recorded=record.setting.compile != "off"
        )
    except PlannerError as error:
        return Verdict(record, "refused", said=error.message)
    allocated = found.peak_allocated_bytes / record.peak_allocated_bytes - 1
    reserved = found.peak_reserved_bytes / record.peak_reserved_bytes - 1
    if record.setting.compiles:
        found_within = [
            RECORDED_BASIS.low <= 1 / (1 + e) <= RECORDED_BASIS.high for e in (allocated, reserved)
        ]
        what = "within" if all(found_within) else "wrong"
    else:
        what = "equal" if max(abs(allocated), abs(reserved)) <= EQUAL else "wrong"
    return Verdict(record, what, allocated, reserved)


def show_compiled(verdicts: Sequence[Verdict]) -> str:
    rows = [
        [v.record.model.title, v.what, *("–" if e is None else f"{e:+.1%}"
         for e in (v.allocated, v.reserved)), v.said.partition(" at ")[0]]
        for v in verdicts
    ]  # fmt: skip
    return tabulate(rows, ["model", "", "allocated", "reserved", "said"], disable_numparse=True)


def show(verdicts: Sequence[Verdict]) -> str:
    """How many of each library are what, and those that are not equal."""
    rows = []
    for library in dict.fromkeys(library_of(v.record) for v in verdicts):
        found = [v for v in verdicts if library_of(v.record) == library]
        counts = Counter(v.what for v in found)
        models = len({v.record.model.title for v in found})
        rows.append([library, models, len(found), *(counts[what] for what in WHATS)])
    rows.append(["all", *map(sum, zip(*(row[1:] for row in rows), strict=True))])
    others = [
        [v.record.model.title, v.record.setting.precision, v.record.setting.checkpointing, v.what,
         *("–" if e is None else f"{e:+.2%}" for e in (v.allocated, v.reserved)),
         v.said.partition(" at ")[0]]
        for v in sorted(verdicts, key=lambda v: (v.what, v.record.model.title))
        if v.what != "equal"
    ]  # fmt: skip
    headers = ["model", "precision", "checkpointing", "", "allocated", "reserved", "said"]
    tables = [tabulate(rows, ["", "models", "steps", *WHATS])]
    tables += [tabulate(others, headers, disable_numparse=True)] if others else []
    return "\n\n".join(tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="MODELs of planner estimate")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--kept", action="store_true", help="run nothing")
    parser.add_argument("--compiled", action="store_true", help="compiled steps")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    path = given.record or records_path(given.compiled)
    if given.here:
        rows = rows_of(given.models, given.compiled)
        # Its memory is steady from the second step on.
        measure(rows, "cuda:0", path, warmup_seconds=0, min_measure_seconds=0, max_steps=3)
        return
    if not given.kept:
        run(given.models, path, given.compiled)
    verdicts = [judge(record) for record in read_records(path).records]
    print(show_compiled(verdicts) if given.compiled else show(verdicts))


if __name__ == "__main__":
    main()
