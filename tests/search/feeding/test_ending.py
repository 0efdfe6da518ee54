"""How the part of a search that feeds ends: budgets, Ctrl-C in each part, loaders that fail.

The device is invented and so are the loader's search and the fed run: what is tested is what `tune`
makes of them. Real ones are in test_fed.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.core.errors import UnsupportedError
from planner.core.schema.loading import DataRecommendation, FedRecord
from planner.core.schema.result import Recommendation
from search.tuning.feeding import phase
from search.tuning.tune import tune
from tests.search.feeding.pictures import make_folder
from tests.search.feeding.test_analysis import fed_of
from tests.search.feeding.test_phase import data_of
from tests.search.tables import MODEL, SMALL, make_record
from tests.search.test_tune import probe


class Asked(list[dict[str, Any]]):
    """What the invented parts were called with."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """A loader's search and a fed run that succeed."""
    calls = Asked()

    def find_loader(source: Any, **options: Any) -> DataRecommendation:
        calls.append({"part": "loader", **options})
        return data_of(source)

    def prove(request: Any, **options: Any) -> FedRecord:
        calls.append({"part": "proof", "request": request, **options})
        step = make_record(request.setting)
        return fed_of(step, data_of(request.source).evidence, 480.0, 0.3).model_copy(  # type: ignore[arg-type]
            update={"loader": request.loader, "data": request.source}
        )

    monkeypatch.setattr(phase, "find_loader", find_loader)
    monkeypatch.setattr(phase, "prove", prove)
    return calls


def run(tmp_path: Path, **options: Any) -> Recommendation:
    folder = tmp_path / "pictures"
    if not folder.exists():
        make_folder(folder)
    given: dict[str, Any] = {
        "output": tmp_path / "run", "restrict": SMALL, "estimator": None, "prober": probe,
        "batch_size": (8, 32, 128), "data": folder, "baseline": False,
        "storage": str(tmp_path / "study.journal"),
    }  # fmt: skip
    return tune(MODEL, **{**given, **options})


def said(found: Recommendation) -> str:
    notes = found.feeding.notes if found.feeding else ()
    return " ".join((*found.notes, *notes))


@pytest.mark.usefixtures("gpu")
def test_the_loader_is_sought_for_the_recommended_batch(tmp_path: Path, asked: Asked) -> None:
    found = run(tmp_path, budget_seconds=1000.0)
    loader, proof = asked
    assert loader["batch_size"] == found.setting.batch_size
    assert loader["image_size"] == MODEL.image_size
    # A quarter of the whole, and of what the step left as much more.
    assert 200 < loader["budget_seconds"] <= 1000.0 * 0.25 / 0.35
    assert proof["request"].setting == found.setting
    assert proof["request"].loader.batch_size == found.setting.batch_size
    assert proof["deadline_seconds"] <= 1000.0
    assert found.feeding.loader.batch_size == found.setting.batch_size
    assert found.feeding.together is not None


def nothing_loads(source: Any, **options: Any) -> DataRecommendation:
    return data_of(source).model_copy(
        update={"setting": None, "evidence": None, "advice": "No probe ended well (4 faulty)."}
    )


def refuses(source: Any, **options: Any) -> DataRecommendation:
    raise UnsupportedError("none of torchvision, timm and transformers is installed.", "Install")


@pytest.mark.usefixtures("gpu", "asked")
@pytest.mark.parametrize(
    ("find_loader", "reason"),
    [(nothing_loads, "4 faulty"), (refuses, "none of torchvision")],
)  # fmt: skip
def test_data_that_cannot_be_measured_leave_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, find_loader: Callable[..., Any], reason: str
) -> None:
    monkeypatch.setattr(phase, "find_loader", find_loader)
    found = run(tmp_path)
    assert found.status == "recommended"
    assert found.feeding is None
    assert [note for note in found.notes if reason in note], found.notes


@pytest.mark.usefixtures("gpu", "asked")
def test_what_the_loader_fails_of_is_kept_with_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step's result is on disk before its data are looked at."""

    def dies(source: Any, **options: Any) -> DataRecommendation:
        raise SystemExit(9)

    monkeypatch.setattr(phase, "find_loader", dies)
    with pytest.raises(SystemExit):
        run(tmp_path)
    text = (tmp_path / "run" / "recommendation.json").read_text()
    assert Recommendation.model_validate_json(text).setting is not None
