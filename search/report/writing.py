"""From steps and runs to one page in a file."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from planner import __version__
from planner.errors import PlannerError, UsageError
from planner.files import write_whole
from planner.page.contents import Group, Page
from planner.page.rendering import page_html
from planner.report.pages.step import Step, step_group
from search.report.group import run_group
from search.report.run import Run

Subject = Step | Run


def make_page(subjects: Sequence[Subject], title: str = "") -> Page:
    """The page of one subject, or of several side by side."""
    several = len(subjects) > 1
    groups = [
        _group(subject, f"g{number}", subject.title if several else "")
        for number, subject in enumerate(subjects, start=1)
    ]
    day = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return Page(
        title=title or (f"{len(subjects)} side by side" if several else subjects[0].title),
        lead="",
        groups=groups,
        made=f"planner {__version__}, {day}",
    )


def _group(subject: Subject, key: str, title: str) -> Group:
    if isinstance(subject, Run):
        return run_group(subject, key, title)
    return step_group(subject, key, title)


def write_page(page: Page, output: str | Path) -> Path:
    """Writes the page, whole or not at all. Raises UsageError for another ending than .html,
    PlannerError where it cannot be written."""
    path = Path(output)
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"a report's file name ends in .html, and {path.name!r} does not.")
    if not path.parent.is_dir():
        raise PlannerError(f"the report cannot be written to {path}: the folder does not exist.")
    try:
        write_whole(path.resolve(), page_html(page).encode())
    except OSError as error:
        raise PlannerError(f"the report cannot be written to {path}: {error.strerror}.") from None
    return path
