"""The search against the recorded exhaustive grids of loaders, and against one that is simulated.

The grids of `tests/truth/cpu_loaders_*.jsonl` are recorded by `tests/benchmarks/data_grid.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.schema.loading import LoaderRecord
from search.loader.space import make_loader_space
from search.study.records import append_records, read_records
from tests.benchmarks.data_grid import replay, show
from tests.search.loader.simulated import SOURCE, Machine, SimulatedProber

TABLES = sorted((Path(__file__).parents[2] / "truth").glob("cpu_loaders_*.jsonl"))


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
def test_it_is_within_5_percent_of_the_grid_in_a_third_of_its_probes(table: Path) -> None:
    records = read_records(table, LoaderRecord).records
    assert records[0].data.synthetic
    assert records[0].data.num_items == 2000
    assert records[0].host["processor"]
    outcome = replay(records)
    assert outcome.loss <= 0.05
    assert outcome.num_probes <= outcome.num_candidates / 3


def test_a_table_is_replayed_as_it_was_recorded(tmp_path: Path) -> None:
    """Two rounds of a machine of two processors, in a file as the benchmark writes it."""
    machine = Machine(2, {"torchvision": 0.007, "timm": 0.006}, noise=0.01)
    space = make_loader_space(
        SOURCE, machine.host, 32, (224, 224), has_cuda=False, pipelines=list(machine.cpu_seconds)
    )
    prober, table = SimulatedProber(machine), tmp_path / "table.jsonl"
    for _ in range(2):
        for c in space.candidates:
            found = prober.record(c.setting)
            host = {"usable_cpus": 2, "quota_cpus": None, "processor": "simulated"}
            append_records(table, [found.model_copy(update={"host": host})])
    records = read_records(table, LoaderRecord).records
    assert len(records) == 2 * len(space) == 52
    outcome = replay(records)
    assert outcome.num_candidates == 26
    assert outcome.num_probes <= 26 / 3
    assert outcome.loss <= 0.05
    assert "simulated" in show(records, outcome)
