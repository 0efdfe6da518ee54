"""`planner data`: a search of simulated loaders, printed and kept, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.cli import main
from planner.core.schema.loading import LoaderRecord
from search.loader import finding
from search.loop.study.records import read_records
from tests.loading.made import folder_of, listing
from tests.search.loader.simulated import Machine, SimulatedProber


class InPlace(SimulatedProber):
    """Of a real one."""

    def __init__(self, *_: object) -> None:
        super().__init__(Machine(2, {"timm": 0.01}))

    def __enter__(self) -> InPlace:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def test_it_searches_loaders_and_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(finding, "LoaderProber", InPlace)
    pictures, output = folder_of(tmp_path / "pictures"), tmp_path / "fed"
    before = listing(pictures)
    arguments = [
        "data", str(pictures), "--batch-size", "4", "--image-size", "32", "--pipelines", "timm",
        "--workers", "0,1", "--prefetch", "2", "--device", "cpu", "--output", str(output),
    ]  # fmt: skip
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "Recommended for" in said
    assert "It is bound by" in said
    records = read_records(output / "loader.jsonl", LoaderRecord).records
    assert {r.setting.workers for r in records} == {0, 1}
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_probes"] == len(records)
    assert json.loads((output / "data.json").read_text())["setting"] == found["setting"]
    assert listing(pictures) == before


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--device", "cpu"], "no data were named"),
        (["picures"], "there is no folder or file"),
        (["d", "--synthetic", "1", "--strategy", "grit"], "Did you mean 'grid'"),
        (["d", "--synthetic", "1", "--for", "native:swin_tinny"], "swin_tinny"),
        (["d", "--synthetic", "1", "--gpu", "h100"], "no model is named"),
    ],
)
def test_what_is_typed_wrongly_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: list[str], said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["data", *typed]) == 2
    error = capsys.readouterr().err
    assert error.startswith("Error: ")
    assert said in error
    assert "Traceback" not in error
    assert "--memory" not in error, "which the command does not have"
    assert not (tmp_path / "d").exists(), "pictures were made before it was refused"
