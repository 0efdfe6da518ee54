"""The pages of `planner report` themselves, in Chromium: an estimate, several, and a search."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from planner.cli import cli
from search.loop.records import read_records
from tests.page.browser import (
    FORMS,
    looking_at,
    nameless,
    print_page,
    sideways,
    take_picture,
    unreadable,
)
from tests.search.replays import leave_run

pytestmark = pytest.mark.browser
TRUTH = Path(__file__).parents[1] / "truth" / "cpu_grid_2026-11-20.jsonl"
MODEL = "native:swin_tiny"
SUBJECTS = {
    "estimate": [MODEL, "--gpu", "a100-sxm-80gb", "--gpus", "4", "--checkpointing", "stages"],
    "several": [MODEL, "--gpu", "h100-sxm-80gb,rtx-3090"],
    "run": ["run"],
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a page of each of SUBJECTS."""
    folder = tmp_path_factory.mktemp("reports")
    run = leave_run(folder / "run", read_records(TRUTH).records)
    for name, subjects in SUBJECTS.items():
        targets = [str(run) if subject == "run" else subject for subject in subjects]
        command = ["report", *targets, "--output", str(folder / f"{name}.html")]
        done = CliRunner().invoke(cli, command)
        assert done.exit_code == 0, done.output
    return folder


@pytest.mark.parametrize(("name", "form"), zip(SUBJECTS, FORMS, strict=True))
def test_a_report_is_readable_as_wide_as_its_window_and_prints(
    reports: Path, tmp_path: Path, name: str, form: str
) -> None:
    with looking_at(reports / f"{name}.html", form) as page:
        take_picture(page, tmp_path, f"{name}-{form}")
        assert sideways(page) <= 0
        assert nameless(page) == []
        assert unreadable(page) == []
        assert page.locator("[data-chart]").count() > 0
        page.set_viewport_size({"width": 1200, "height": 900})
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        over = page.evaluate(  # a table of ten columns or more scrolls in its box
            """() => [...document.querySelectorAll("figure.table .scroll")]
              .filter((box) => box.querySelectorAll("th").length < 10)
              .filter((box) => box.scrollWidth > box.clientWidth)
              .map((box) => box.textContent.slice(0, 80))"""
        )
        assert over == []
        assert print_page(page, tmp_path, name).read_bytes().startswith(b"%PDF")
