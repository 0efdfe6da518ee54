"""The page's group of one search: its sections in order."""

from __future__ import annotations

from planner.page.contents import Group
from search.report.answer import answer
from search.report.axes import axes_sections
from search.report.environment import environment
from search.report.expected import expected_of_loaders, expected_sections
from search.report.feeding import feeding
from search.report.front import front
from search.report.loader import loader
from search.report.probes import probes
from search.report.reasons import reasons
from search.report.run import Run
from search.report.seen import seen
from search.report.trainers import trainers


def run_group(run: Run, key: str, title: str = "") -> Group:
    """All sections of a run. `key` is unique on the page: charts and anchors begin with it."""
    sections = [
        *answer(run),
        *front(run, key),
        *reasons(run),
        *probes(run, key),
        *expected_sections(run, key),
        *axes_sections(run, key),
        *feeding(run, key),
        *loader(run, key),
        *expected_of_loaders(run, key),
        *trainers(run, key),
        *seen(run),
        *environment(run, key),
    ]
    return Group(key, title, sections)
