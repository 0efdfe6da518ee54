"""`planner data` through the real command: real probes of a few made pictures, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.cli import main
from planner.core.schema.loading import LoaderRecord
from planner.training.loading.synthetic import make_synthetic
from search.loop.study.records import read_records
from tests.cli.test_tune import planner

TINY = [
    "--batch-size", "4", "--image-size", "32", "--pipelines", "timm", "--workers", "0,1",
    "--prefetch", "2", "--device", "cpu", "--budget", "none",
]  # fmt: skip


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    make_synthetic(folder, 24)
    return folder


def listing(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(p.relative_to(folder)), p.stat().st_mtime_ns) for p in folder.rglob("*"))


def test_it_searches_real_loaders_and_goes_on_from_there(pictures: Path, tmp_path: Path) -> None:
    """Three pictures are broken: they are named, and nothing is written beside them."""
    for picture in sorted(pictures.rglob("*.jpg"))[:3]:
        picture.write_bytes(picture.read_bytes()[:1000])
    before, output = listing(pictures), tmp_path / "fed"
    arguments = ["data", str(pictures), *TINY, "--output", str(output)]
    done = planner(*arguments)
    assert done.returncode == 0, done.stderr
    assert "Recommended for" in done.stdout
    assert "It is bound by" in done.stdout
    assert "Cannot be loaded:" in done.stdout
    records = read_records(output / "loader.jsonl", LoaderRecord).records
    assert [r.setting.workers for r in records] == [0, 1]
    assert all(r.status == "measured" and r.stage_seconds for r in records)
    again = planner(*arguments, "--json")
    assert again.returncode == 0, again.stderr
    found = json.loads(again.stdout)
    assert found["num_probes"] == 2
    assert len(found["faults"]) == 3
    assert found["faults"][0]["item"].endswith(".jpg")
    assert json.loads((output / "data.json").read_text())["setting"] == found["setting"]
    assert listing(pictures) == before


@pytest.mark.release
def test_where_nothing_loads_the_status_is_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "def make():\n    raise RuntimeError('the list of files is lost')\n"
    )
    monkeypatch.chdir(tmp_path)
    done = planner("data", "mine:make", "--workers", "0", "--device", "cpu", "--output", "fed")
    assert done.returncode == 1, done.stderr
    assert "the list of files is lost" in done.stdout
    assert "Nothing loads mine:make" in done.stdout


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ([], "no data were named"),
        (["picures"], "there is no folder or file"),
        (["nosuch:make"], "nor a module 'nosuch'"),
        (["--synthetic", "0"], "0 is not in the range"),
        (["d", "--synthetic", "1", "--strategy", "grit"], "Did you mean 'grid'"),
        (["d", "--synthetic", "1", "--workers", ""], "--workers has no value"),
        (["d", "--synthetic", "1", "--for", "native:swin_tinny"], "swin_tinny"),
        (["d", "--synthetic", "1", "--gpu", "h100"], "no model is named"),
        (["d", "--synthetic", "1", "--gpu", "h1000", "--for", "native:swin_tiny"], "unknown GPU"),
        (["d", "--synthetic", "1", "--device", "cuda:99"], "cuda:99 cannot be used"),
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
