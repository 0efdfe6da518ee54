"""The page's group of one predicted step: its sections in order."""

from __future__ import annotations

from dataclasses import replace

from planner.machine.hardware.overheads import processors_of
from planner.memory.scratch import on_device
from planner.report.page.contents import Group
from planner.report.pages.answer import answer
from planner.report.pages.course import step_course
from planner.report.pages.over_time import over_time
from planner.report.pages.peak import peak
from planner.report.pages.predicted_time import predicted_time
from planner.report.pages.step import Step
from planner.report.pages.totals import totals


def step_group(step: Step, key: str, title: str = "") -> Group:
    """All sections of a step. `key` is unique on the page: charts and anchors begin with it."""
    step = replace(step, ledger=on_device(step.ledger, processors_of(step.gpu)))
    course = step_course(step)
    sections = [
        answer(step),
        over_time(step, course, key),
        peak(step, course),
        totals(step, key),
        predicted_time(step, key),
    ]
    return Group(key, title, sections)
