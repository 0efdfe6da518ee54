"""Records of different environments are never compared without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.cli import main
from planner.core.schema import DeviceInfo, MeasurementRecord, TrainSetting
from planner.machine.torch_build import TorchBuild
from search import tune
from search.loop.study.mixture import describe_mixture
from search.loop.study.records import append_records
from search.probe import device
from tests.search.tables import GPU, invented_table, make_record


def record(batch: int, found_on: DeviceInfo = GPU, **versions: str) -> MeasurementRecord:
    made = make_record(TrainSetting(batch_size=batch), probe_id=f"probe-{batch}", device=found_on)
    return made.model_copy(update={"versions": {"torch": "2.13.0", **versions}})


def test_one_environment_is_no_mixture() -> None:
    cpu = DeviceInfo(kind="cpu", name="a CPU", total_bytes=1 << 30)
    assert describe_mixture([]) is None
    assert describe_mixture([record(1, cudnn="9.20.0"), record(2, cudnn="9.20.0")]) is None
    alike = GPU.model_copy(update={"uuid": "GPU-another"})
    assert describe_mixture([record(1), record(2, alike)]) is None
    assert "device" in (describe_mixture([record(1), record(2, cpu)]) or "")


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


def test_validate_says_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name, cudnn in (("a", "9.20.0"), ("b", "9.10.2")):
        append_records(tmp_path / name, [record(1, cudnn=cudnn)])
    one = ["validate", "--replay", str(tmp_path / "a")]
    assert main(one) == 0
    assert "several environments" not in capsys.readouterr().err
    assert main([*one, "--replay", str(tmp_path / "b")]) == 0
    assert "cudnn 9.20.0, 9.10.2. See what else differs" in capsys.readouterr().err


def test_a_replayed_search_says_it(tmp_path: Path) -> None:
    table = invented_table()
    table[0] = table[0].model_copy(update={"versions": {"torch": "another"}})
    append_records(tmp_path / "table.jsonl", table)
    said: list[str] = []
    tune(None, replay=tmp_path / "table.jsonl", budget_seconds=60,
         on_progress=lambda progress: said.append(str(progress)))  # fmt: skip
    assert any("several environments: torch another, test" in line for line in said)


def test_libraries_are_in_the_versions_of_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    build = TorchBuild("2.13.0+cu130", cuda="13.0", cudnn="92000", nccl="2.29.7", cublas="13.1.0")
    monkeypatch.setattr(device, "torch_build", lambda: "13.0")
    monkeypatch.setattr(device, "ask_torch", lambda environ, tried: build)
    found = dict(device._libraries.__wrapped__())
    assert found == {"cudnn": "9.20.0", "nccl": "2.29.7", "cublas": "13.1.0"}
    monkeypatch.setattr(device, "torch_build", lambda: "cpu")
    assert device._libraries.__wrapped__() == ()
