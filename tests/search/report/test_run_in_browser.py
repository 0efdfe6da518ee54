"""The page of a search in Chromium: looks, hovers, the legend, copying, texts of others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planner.report.page.rendering import page_html
from search.report.output import write_page
from search.report.run import Run
from search.report.writing import make_page
from tests.page.browser import (
    FORMS,
    looking_at,
    nameless,
    sideways,
    take_picture,
    unreadable,
)  # fmt: skip
from tests.search.report.runs import ended, recorded, troubled
from tests.search.report.test_side_by_side import MODEL, record, run_of, step_with

FRONT = '[data-chart="g1-front"]'
pytestmark = pytest.mark.browser
HOSTILE = '<script>alert("1")</script><b>bold</b>\x1b[31m'


def written(run: Run, folder: Path) -> Path:
    path = folder / "report.html"
    path.write_text(page_html(make_page([run])), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trouble(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trouble")
    run = troubled(folder)
    worst = ended(run.records[0], "crashed", HOSTILE * 2000)
    return written(replace(run, records=(*run.records, worst)), folder)


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    folder = tmp_path_factory.mktemp("grid")
    run = recorded(folder)
    return run, written(run, folder)


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several subjects, with a name that would run."""
    model = MODEL.model_copy(update={"name": HOSTILE})
    runs = [run_of(f"run-{n}", record(8 * n, model), record(8)) for n in (1, 2)]
    steps = [step_with(8), step_with(64), step_with(8, world_size=2, parallelism="ddp")]
    return write_page(make_page([*steps, *runs]), tmp_path_factory.mktemp("beside") / "page.html")


@pytest.mark.parametrize("form", FORMS)
def test_several_subjects_are_readable_in_every_window(
    beside: Path, tmp_path: Path, form: str
) -> None:
    with looking_at(beside, form) as page:
        take_picture(page, tmp_path, f"beside-{form}")
        assert sideways(page) <= 0
        assert unreadable(page) == []
        assert nameless(page) == []


def test_a_search_in_which_probes_fail_is_whole(trouble: Path, tmp_path: Path) -> None:
    """The hostile message would open a dialog, or ask something, and fail this."""
    with looking_at(trouble, "narrow") as page:
        take_picture(page, tmp_path, "run-narrow")
        assert sideways(page) <= 0
        assert page.locator("#g1-front .main-svg").count() > 0
        assert page.locator("b", has_text="bold").count() == 0
        assert page.locator("#g1-front").get_by_text("budget").count() > 0
