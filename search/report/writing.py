"""From steps and runs to one page."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from planner import __version__
from planner.page.contents import Group, Page, Section, Text
from planner.report.pages.step import step_group
from search.report.group import run_group
from search.report.lead import Subject, group_titles, lead_of, title_of
from search.report.run import Run
from search.report.side_by_side import beside_group

# Beyond so many subjects a page compares them all, and shows these only one by one: it stays under
# 5 MB, and readable.
MOST_GROUPS = 6


def make_page(subjects: Sequence[Subject], title: str = "") -> Page:
    """The page of one subject, or of several side by side."""
    several = len(subjects) > 1
    titles = group_titles(subjects) if several else [""]
    groups = [
        _group(subject, f"g{number}", titles[number - 1])
        for number, subject in enumerate(subjects[:MOST_GROUPS], start=1)
    ]
    if several:
        ways = [(group.title, group.key) for group in groups]
        groups.insert(0, beside_group(subjects, ways))
    if len(subjects) > MOST_GROUPS:
        groups.append(_others(titles[MOST_GROUPS:]))
    day = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return Page(
        title=title or title_of(subjects),
        lead=lead_of(subjects),
        groups=groups,
        made=f"planner {__version__}, {day}",
    )


def _others(titles: Sequence[str]) -> Group:
    """What the page says of those that it does not show one by one."""
    said = (
        f"{len(titles)} more are compared above, and not shown one by one, so that the page stays "
        f"small. Name fewer, {MOST_GROUPS} at most, to see these too."
    )
    section = Section(
        "left-out", "Not shown one by one", [Text(said), Text("; ".join(titles), "note")]
    )
    return Group("others", "Others", [section])


def _group(subject: Subject, key: str, title: str) -> Group:
    if isinstance(subject, Run):
        return run_group(subject, key, title)
    return step_group(subject, key, title)
