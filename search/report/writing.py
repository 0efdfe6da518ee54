"""From steps and runs to one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from planner import __version__
from planner.advice.advising import advise
from planner.estimation.largest import largest_batch
from planner.estimation.ledgers import is_on_shapes
from planner.report.page.contents import Group, Page, Section, Text
from planner.report.pages.sections import step_group
from planner.report.pages.step import Step
from search.report.answer import answer, reasons
from search.report.environment import environment
from search.report.expected import expected_sections
from search.report.front import front
from search.report.lead import Subject, group_titles, lead_of, title_of
from search.report.probes import probes
from search.report.recommendation import feeding
from search.report.run import Run
from search.report.side_by_side import beside_group
from search.report.statistics import axes_sections
from search.report.trainers import trainers

# Beyond so many subjects a page compares them all, and shows these only one by one: it stays under
# 5 MB, and readable.
MOST_GROUPS = 6
MOST_WAYS = 3


def make_page(subjects: Sequence[Subject], title: str = "") -> Page:
    """The page of one subject, or of several side by side."""
    several = len(subjects) > 1
    if not several:
        subjects = [with_ways(one) if isinstance(one, Step) else one for one in subjects]
    titles = group_titles(subjects) if several else [""]
    groups = [
        replace(_group(subject, f"g{number}", titles[number - 1]), folded=several)
        for number, subject in enumerate(subjects[:MOST_GROUPS], start=1)
    ]
    if several:
        groups.insert(0, beside_group(subjects))
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


def with_ways(step: Step) -> Step:
    """A step with the largest batch that fits and, where it does not fit itself, what fits in its
    place. Of a traced model neither: every batch and every way would be a trace."""
    estimate = step.estimate
    model, setting = estimate.model, estimate.setting
    if estimate.budget_bytes is None or not is_on_shapes(model, setting):
        return step
    best = largest_batch(
        model, setting, step.gpu, step.memory_bytes, allocator=step.allocator, link=step.link
    )
    step = replace(step, largest=best)
    if estimate.fits:
        return step
    found = advise(
        model, setting, gpu=step.gpu, memory_bytes=step.memory_bytes, allocator=step.allocator,
        link=step.link, batch_size=setting.batch_size * setting.accumulate,
    )  # fmt: skip
    ways = [way for way in (found.recommended, found.surely, *found.ways) if way is not None]
    return replace(step, ways=[*{way.changes: way for way in ways}.values()][:MOST_WAYS])


def run_group(run: Run, key: str, title: str = "") -> Group:
    """All sections of a run. `key` is unique on the page: charts and anchors begin with it."""
    sections = [
        *answer(run),
        *front(run, key),
        *reasons(run),
        *probes(run, key),
        *expected_sections(run, key),
        *axes_sections(run, key),
        *feeding(run),
        *trainers(run, key),
        *environment(run),
    ]
    return Group(key, title, sections)
