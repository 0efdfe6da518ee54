"""`planner report`: what it draws, and what it refuses before anything is estimated."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import search
from planner.cli import cli
from planner.cli.report import command
from planner.core.errors import PlannerError, UsageError
from planner.core.schema import TrainSetting
from planner.machine.hardware import all_gpus
from planner.report.pages import MAX_GROUPS
from search.loop.records import append_records
from tests.search.tables import make_record

SMALL = "native:swin_tiny"
OPTIONS = ("--image-size", "64", "--set", "window_size=2")


def report(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["report", *arguments], catch_exceptions=False)


def refused(*arguments: str) -> str:
    with pytest.raises(PlannerError) as raised:
        CliRunner().invoke(command, list(arguments), catch_exceptions=False)
    assert raised.value.way_out, "it says what to do instead"
    return str(raised.value)


@pytest.fixture
def page(tmp_path: Path) -> str:
    return str(tmp_path / "page.html")


@pytest.fixture
def run_folder(tmp_path: Path) -> str:
    folder = tmp_path / "tuned"
    folder.mkdir()
    append_records(folder / "probes.jsonl", [make_record(TrainSetting(batch_size=8))])
    return str(folder)


def test_the_whole_catalogue_is_ranked_on_one_page(page: str) -> None:
    result = report(SMALL, *OPTIONS, "--set", "depths=1,1,1,1", "--gpu", "all", "--output", page)
    assert result.exit_code == 0, result.output
    assert "fp16 instead: " in result.stderr
    assert Path(page).stat().st_size < 5_000_000
    text = Path(page).read_text()
    assert f"{len(all_gpus()) - MAX_GROUPS} more are compared above, and not shown one" in text
    assert text.count('<details class="group"') == MAX_GROUPS


def test_nothing_is_drawn_twice(page: str, run_folder: str) -> None:
    """A run neither by two of its names."""
    same_run = (run_folder, f"{run_folder}/../tuned")
    for twice in (same_run, (SMALL, SMALL, *OPTIONS), (SMALL, "--gpu", "rtx4090,RTX 4090")):
        assert "is named twice" in refused(*twice, "--output", page)


def test_somebody_s_file_is_replaced_only_by_force(page: str) -> None:
    Path(page).write_text("my notes")
    assert "'planner report' did not write it" in refused(SMALL, *OPTIONS, "--output", page)
    assert Path(page).read_text() == "my notes"
    assert report(SMALL, *OPTIONS, "--output", page, "--force").exit_code == 0
    assert report(SMALL, *OPTIONS, "--output", page).exit_code == 0  # it is ours now


def test_an_output_that_can_be_no_page_is_refused_first(page: str) -> None:
    """Other laws of it: tests/test_files.py."""
    os.mkfifo(page)
    for output, said in (("-", "ends in .html or .htm"), (page, "is no file that can be replaced")):
        assert said in refused("native:no_such_model", "--output", output, "--force")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_leaves_what_was_there(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert report(SMALL, *OPTIONS, "--output", page).exit_code == 0
    before = Path(page).read_bytes()
    from planner.core import files

    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(files.os, "open", lambda *arguments: full)
    said = refused(SMALL, *OPTIONS, "--output", page)
    assert "No space left on device.\nFree space, or name another file." in said
    assert Path(page).read_bytes() == before


def test_python_writes_the_same_page(page: str, run_folder: str) -> None:
    fields = {"image_size": 64, "window_size": 2}
    path = search.write_report(
        [SMALL, run_folder, search.report_estimate(SMALL, batch_size=2, **fields)],
        page, gpu=["rtx4090", "a100-sxm-80gb"], batch_size=4, title="Mine", **fields,
    )  # fmt: skip
    assert path == Path(page)
    assert "<title>Mine</title>" in path.read_text()


@pytest.mark.parametrize("storage", ["sqlite:///study.db", "study.journal", "mysql://me:pw@db/x"])
def test_a_storage_is_answered_with_the_folder_beside_it(page: str, storage: str) -> None:
    said = refused(storage, "--output", page)
    assert "Name the --output of any of its tuners" in said
    assert "pw" not in said


def test_python_refuses_what_the_command_refuses(page: str, run_folder: str) -> None:
    with pytest.raises(UsageError, match="gpu: nothing is estimated"):
        search.write_report(run_folder, page, gpu="rtx4090")
    with pytest.raises(UsageError, match="a report needs a run or a model"):
        search.write_report([], page)
