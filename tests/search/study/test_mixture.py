"""Records of different environments are never compared without a word."""

from __future__ import annotations

from pathlib import Path

from planner.core.schema import DeviceInfo, MeasurementRecord, TrainSetting
from search import tune
from search.loop.study.mixture import describe_mixture
from search.loop.study.records import append_records
from tests.search.tables import GPU, invented_table, make_record


def record(batch: int, found_on: DeviceInfo = GPU, **versions: str) -> MeasurementRecord:
    made = make_record(TrainSetting(batch_size=batch), probe_id=f"probe-{batch}", device=found_on)
    return made.model_copy(update={"versions": {"torch": "2.13.0", **versions}})


def test_what_differs_is_named() -> None:
    newer = GPU.model_copy(update={"driver": "580.95.05"})
    older = GPU.model_copy(update={"driver": "570.133.20"})
    said = describe_mixture([
        record(1, newer, cudnn="9.20.0", cuda="13.0"),
        record(2, older, cudnn="9.10.2", cuda="13.0"),
        record(4, older, cuda="13.0"),
    ])  # fmt: skip
    assert said == (
        f"These records are of several environments: device {GPU.name} with driver 580.95.05, "
        f"{GPU.name} with driver 570.133.20; cudnn 9.20.0, 9.10.2, none."
    )


def test_a_replayed_search_says_it(tmp_path: Path) -> None:
    table = invented_table()
    table[0] = table[0].model_copy(update={"versions": {"torch": "another"}})
    append_records(tmp_path / "table.jsonl", table)
    said: list[str] = []
    tune(None, replay=tmp_path / "table.jsonl", budget_seconds=60,
         on_progress=lambda progress: said.append(str(progress)))  # fmt: skip
    assert any("several environments: torch another, test" in line for line in said)
