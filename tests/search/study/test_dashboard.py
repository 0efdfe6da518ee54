"""A study as optuna-dashboard shows it: its own application is asked, in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import pytest
from optuna.artifacts import FileSystemArtifactStore

from planner.core.schema.record import Expected
from search.loop.study.dashboard import FOLDER
from search.loop.study.optuna_study import OptunaStudy, make_study
from search.loop.study.records import parse_record
from tests.search.study.test_study import IDENTITY, SPACE, probe_one
from tests.search.tables import GPU

Get = Callable[[str], Any]
EXPECTED = Expected(
    phase="calibrate", basis="prior", images_per_second=(50.0, 100.0, 200.0),
    used_bytes=(1.0 * 2**30, 2.0 * 2**30, 3.0 * 2**30), fits=0.9,
)  # fmt: skip


def dashboard(study: OptunaStudy, folder: Path) -> Get:
    """GET of the dashboard's own application, as JSON or bytes."""
    optuna_dashboard = pytest.importorskip("optuna_dashboard")
    store = FileSystemArtifactStore(folder / FOLDER)
    app = optuna_dashboard.wsgi(study.storage, artifact_store=store)

    def get(path: str) -> Any:
        environment: dict[str, Any] = {}
        setup_testing_defaults(environment)
        environment |= {"PATH_INFO": path, "QUERY_STRING": "after=0", "REQUEST_METHOD": "GET"}
        seen: list[str] = []
        body = b"".join(app(environment, lambda status, *_: seen.append(status)))
        assert seen[0].startswith("200"), (seen, body[:300])
        return json.loads(body) if path.startswith("/api") else body

    return get


def asked(get: Get) -> tuple[int, dict[str, Any]]:
    """The id of the study that the dashboard lists, and what it says of it."""
    (listed,) = get("/api/studies")["study_summaries"]
    number = listed["study_id"]
    return number, get(f"/api/studies/{number}")


@pytest.mark.parametrize("storage", [None, "{}/study.journal"])
def test_the_dashboard_shows_what_probes_found(tmp_path: Path, storage: str | None) -> None:
    study = make_study(storage and storage.format(tmp_path), tmp_path, SPACE, GPU.total_bytes)
    study.adopt(IDENTITY)
    fits = probe_one(study, 0, expected=EXPECTED)
    fails = probe_one(study, 3, message="needs 40 GiB")  # batch 512 does not fit
    (tmp_path / "recommendation.json").write_text('{"recommended": 1}\n')
    study.attach(tmp_path / "recommendation.json")

    get = dashboard(study, tmp_path)
    number, page = asked(get)
    assert page["objective_names"] == ["images/s"]
    trials = {t["user_attrs"]["probe_id"]: t for t in map(_with_attributes, page["trials"])
              if "probe_id" in t["user_attrs"]}  # fmt: skip
    good, bad = trials[fits], trials[fails]
    assert good["constraints"][0] <= 0 < bad["constraints"][0]
    attributes = good["user_attrs"]
    assert float(attributes["memory (GiB)"]) > 0
    assert attributes["status"] == "measured"
    assert bad["user_attrs"]["status"] == "out_of_memory"
    assert bad["user_attrs"]["why"]

    (kept,) = good["artifacts"]
    assert kept["filename"] == "record.json"
    text = get(f"/artifacts/{number}/{good['trial_id']}/{kept['artifact_id']}")
    kept_record = parse_record(text)
    assert (kept_record.probe_id, kept_record.expected) == (fits, EXPECTED)
    (result,) = page["artifacts"]
    assert result["filename"] == "recommendation.json"
    assert get(f"/artifacts/{number}/{result['artifact_id']}") == b'{"recommended": 1}\n'


def _with_attributes(trial: dict[str, Any]) -> dict[str, Any]:
    return {**trial, "user_attrs": {a["key"]: a["value"].strip('"') for a in trial["user_attrs"]}}
