"""`tune --allocator`: its probes' environment, memory budget, guesses, records and study."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from planner.core.errors import PlannerError, UnsupportedError, UsageError
from planner.core.schema import MeasurementRecord
from planner.core.schema.record import Recommendation
from planner.memory.allocator_config import VARIABLES
from search.loop.limits import Limits
from search.loop.strategies.strategy import Choice
from search.probe.device import versions, worker_environment
from search.probe.parent.environment import probe_environment
from search.tuning import allocator
from search.tuning.tune import tune
from tests.search.tables import GPU, MODEL, SMALL, make_record

OPTIONS = "expandable_segments:True"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, free_gpu: None) -> None:
    """It says something else of the allocator."""
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
    assert told in ({VARIABLES[0]: OPTIONS}, {VARIABLES[0]: "max_split_size_mb:64"})
    return record.model_copy(update={"versions": versions()})


def test_probes_run_under_it_and_say_so(tmp_path: Path) -> None:
    found = run(tmp_path, OPTIONS)
    assert found.evidence.versions["allocator_config"] == OPTIONS
    assert any(f"the allocator's options {OPTIONS}" in note for note in found.notes)
    assert os.environ[VARIABLES[0]] == "max_split_size_mb:64"
    assert VARIABLES[1] not in os.environ
    assert worker_environment()[VARIABLES[0]] == "max_split_size_mb:64"


def test_a_study_does_not_mix_two(tmp_path: Path) -> None:
    run(tmp_path, OPTIONS)
    with pytest.raises(PlannerError, match="allocator_config"):
        run(tmp_path, None)
    found = run(tmp_path, None, accept_different=True)
    assert any("allocator_config" in note for note in found.notes)


def test_what_torch_would_not_start_with_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expandable_segments is True or False"):
        run(tmp_path, "expandable_segments:yes")
    with pytest.raises(UnsupportedError, match="leaves caching to the driver"):
        run(tmp_path, "backend:cudaMallocAsync")
    with pytest.raises(UsageError, match="omit allocator"):
        tune(None, replay=tmp_path / "x.jsonl", allocator=OPTIONS)


def test_where_nobody_says_otherwise_segments_are_expandable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLES[0])
    monkeypatch.setattr(allocator, "torch_build", lambda: "13.0")
    found = run(tmp_path, None)
    assert found.evidence.versions["allocator_config"] == OPTIONS
    assert any("--allocator expandable_segments:False" in note for note in found.notes)
    assert VARIABLES[0] not in os.environ
    for device, build in (("cpu", "13.0"), ("cuda:0", "rocm6.4"), ("cuda:0", None)):
        monkeypatch.setattr(allocator, "torch_build", lambda build=build: build)
        assert allocator.usual_options(device) == (None, [])
    monkeypatch.setenv(VARIABLES[1], "")
    monkeypatch.setattr(allocator, "torch_build", lambda: "13.0")
    assert allocator.usual_options("cuda:0") == (None, []), "set to nothing, torch has its own way"


@pytest.mark.parametrize(
    ("speed", "status", "said", "wins"),
    [
        (1.0, "measured", "not faster beyond noise", False),
        (1.2, "measured", "recommended without", True),
        (1.2, "out_of_memory", "without it does not fit", False),
    ],
)
def test_the_winner_is_held_against_torch_s_own_way(
    tmp_path: Path, speed: float, status: str, said: str, wins: bool
) -> None:
    found = run(tmp_path / "run", OPTIONS)
    num_probes = 0

    def without(choice: Choice, probe_id: str, deadline_seconds: float) -> MeasurementRecord:
        nonlocal num_probes
        num_probes += 1
        assert os.environ[VARIABLES[0]] == allocator.TORCHS_OWN
        record = make_record(choice.candidate.setting, total_bytes=GPU.total_bytes)
        samples = tuple(s / speed for s in record.step_seconds)
        rate = (record.images_per_second or 0) * speed
        update = {"versions": versions(), "status": status, "images_per_second": rate}
        return record.with_samples(samples).model_copy(update=update)

    def compared() -> Recommendation:
        return allocator.compare_allocators(
            found, lambda: without, Limits(), 0, None, tmp_path / "allocator.jsonl"
        )

    better = compared()
    assert said in better.notes[-1]
    assert (better.evidence != found.evidence) == wins
    assert better.evidence.versions["allocator_config"] == (
        allocator.TORCHS_OWN if wins else OPTIONS
    )
    assert (compared(), num_probes) == (better, 1), "what is kept is not probed again"
    over = allocator.compare_allocators(found, lambda: without, Limits(3), 3, None, tmp_path / "x")
    assert "--trials allowed no more" in over.notes[-1]
