"""`tune --allocator`: its probes' environment, memory budget, guesses, records and study."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from planner.errors import PlannerError, UnsupportedError, UsageError
from planner.hardware import recognise_gpu
from planner.hardware.overheads import overheads_for
from planner.memory.allocator_config import VARIABLES
from planner.schema import MeasurementRecord
from planner.schema.result import Recommendation
from planner.units import GIB, format_bytes
from search import tuning as tune_file
from search.probe.device import MemoryInUse, versions, worker_environment
from search.probe.parent.environment import probe_environment
from search.strategies.strategy import Choice
from search.tuning import tune
from tests.search.tables import GPU, MODEL, SMALL, make_record

OPTIONS = "expandable_segments:True"


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of 16 GiB, and an environment that says something else of the allocator."""
    monkeypatch.setattr(tune_file, "choose_device", lambda wanted: "cuda:0")
    monkeypatch.setattr(tune_file, "describe_device", lambda wanted: GPU)
    monkeypatch.setattr(tune_file, "least_free", lambda wanted: MemoryInUse(16 * GIB, 0, 16 * GIB))
    monkeypatch.setenv(VARIABLES[0], "max_split_size_mb:64")


def run(tmp_path: Path, allocator: str | None, **options: object) -> Recommendation:
    given: dict[str, object] = {
        "output": tmp_path, "restrict": SMALL, "estimator": None, "prober": probe,
        "batch_size": (8, 16), "allocator": allocator,
    }  # fmt: skip
    return tune(MODEL, **{**given, **options})  # type: ignore[arg-type]


def probe(choice: Choice, probe_id: str, deadline_seconds: float) -> MeasurementRecord:
    """A record as a worker started now would be of."""
    record = make_record(choice.candidate.setting, total_bytes=GPU.total_bytes)
    started = probe_environment()
    told = {name: started[name] for name in VARIABLES if name in started}
    assert told in ({VARIABLES[1]: OPTIONS}, {VARIABLES[0]: "max_split_size_mb:64"})
    return record.model_copy(update={"versions": versions()})


def test_probes_run_under_it_and_say_so(tmp_path: Path) -> None:
    found = run(tmp_path, OPTIONS)
    assert isinstance(found.evidence, MeasurementRecord)
    assert found.evidence.versions["allocator_config"] == OPTIONS
    assert any(f"the allocator's options {OPTIONS}" in note for note in found.notes)
    assert os.environ[VARIABLES[0]] == "max_split_size_mb:64"
    assert VARIABLES[1] not in os.environ
    assert worker_environment()[VARIABLES[0]] == "max_split_size_mb:64"


def test_without_it_probes_run_as_the_environment_says(tmp_path: Path) -> None:
    found = run(tmp_path, None)
    assert found.versions["allocator_config"] == "max_split_size_mb:64"


def test_a_study_does_not_mix_two(tmp_path: Path) -> None:
    run(tmp_path, OPTIONS)
    with pytest.raises(PlannerError, match="allocator_config"):
        run(tmp_path, None)
    found = run(tmp_path, None, accept_different=True)
    assert any("allocator_config" in note for note in found.notes)


def test_a_memory_fraction_lowers_the_budget(tmp_path: Path) -> None:
    """To half of the device's memory and the CUDA context."""
    half = run(tmp_path, "per_process_memory_fraction:0.5", prober=plain_probe)
    context = overheads_for(recognise_gpu(GPU.name, GPU.total_bytes)).context_bytes
    left = f"per_process_memory_fraction leaves {format_bytes(8 * GIB + context)}"
    assert any(note.startswith(left) for note in half.notes), half.notes


def plain_probe(choice: Choice, probe_id: str, deadline_seconds: float) -> MeasurementRecord:
    record = make_record(choice.candidate.setting, total_bytes=GPU.total_bytes)
    return record.model_copy(update={"versions": versions()})


def test_what_torch_would_not_start_with_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expandable_segments is True or False"):
        run(tmp_path, "expandable_segments:yes")
    with pytest.raises(UnsupportedError, match="leaves caching to the driver"):
        run(tmp_path, "backend:cudaMallocAsync")
    with pytest.raises(UsageError, match="omit allocator"):
        tune(None, replay=tmp_path / "x.jsonl", allocator=OPTIONS)
