"""`tune --allocator`: its probes' environment, memory budget, guesses, records and study."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from planner.core.errors import PlannerError, UnsupportedError, UsageError
from planner.core.schema import MeasurementRecord
from planner.core.schema.record import Recommendation
from planner.memory.allocator_config import VARIABLES
from search.loop.space import Choice
from search.probe.device import versions, worker_environment
from search.probe.parent.environment import probe_environment
from search.tuning import tune as tune_file
from search.tuning.tune import tune
from tests.search.tables import GPU, MODEL, SMALL, make_record

OPTIONS = "expandable_segments:True"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, free_gpu: None) -> None:
    """It says something else of the allocator, and probes' versions say that."""
    monkeypatch.setattr(tune_file, "versions", versions)
    monkeypatch.setenv(VARIABLES[0], "max_split_size_mb:64")


def run(
    tmp_path: Path, allocator: str | None, said: list[str] | None = None, **options: object
) -> Recommendation:
    """`said` hears what is shown."""
    heard = [] if said is None else said
    given: dict[str, object] = {
        "on_progress": lambda progress: heard.append(progress.text),
        "output": tmp_path, "restrict": SMALL, "estimator": None, "prober": probe,
        "batch_size": (8, 16), "allocator": allocator,
    }  # fmt: skip
    return tune(MODEL, **{**given, **options})  # type: ignore[arg-type]


def probe(choice: Choice, probe_id: str, deadline_seconds: float) -> MeasurementRecord:
    """A record as a worker started now would be of."""
    record = make_record(choice.candidate.setting, total_bytes=GPU.total_bytes)
    started = probe_environment()
    told = {name: started[name] for name in VARIABLES if name in started}
    assert told in ({VARIABLES[0]: OPTIONS}, {VARIABLES[0]: "max_split_size_mb:64"})
    return record.model_copy(update={"versions": versions()})


def test_probes_run_under_it_and_say_so(tmp_path: Path) -> None:
    said: list[str] = []
    found = run(tmp_path, OPTIONS, said)
    assert found.evidence.versions["allocator_config"] == OPTIONS
    assert any(f"the allocator's options {OPTIONS}" in text for text in said)
    assert os.environ[VARIABLES[0]] == "max_split_size_mb:64"
    assert VARIABLES[1] not in os.environ
    assert worker_environment()[VARIABLES[0]] == "max_split_size_mb:64"


def test_a_study_does_not_mix_two(tmp_path: Path) -> None:
    run(tmp_path, OPTIONS)
    with pytest.raises(PlannerError, match="allocator_config"):
        run(tmp_path, None)
    said: list[str] = []
    run(tmp_path, None, said, accept_different=True)
    assert any("allocator_config" in text for text in said)


def test_what_torch_would_not_start_with_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expandable_segments is True or False"):
        run(tmp_path, "expandable_segments:yes")
    with pytest.raises(UnsupportedError, match="leaves caching to the driver"):
        run(tmp_path, "backend:cudaMallocAsync")


def test_where_nobody_says_otherwise_segments_are_expandable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLES[0])
    monkeypatch.setattr(tune_file, "torch_build", lambda: "13.0")
    said: list[str] = []
    found = run(tmp_path, None, said)
    assert found.evidence.versions["allocator_config"] == OPTIONS
    assert any("--allocator expandable_segments:False" in text for text in said)
    assert VARIABLES[0] not in os.environ
    for device, build in (("cpu", "13.0"), ("cuda:0", "rocm6.4"), ("cuda:0", None)):
        monkeypatch.setattr(tune_file, "torch_build", lambda build=build: build)
        assert tune_file.usual_options(device) == (None, [])
    monkeypatch.setenv(VARIABLES[1], "")
    monkeypatch.setattr(tune_file, "torch_build", lambda: "13.0")
    assert tune_file.usual_options("cuda:0") == (None, []), "set to nothing, torch has its own way"
