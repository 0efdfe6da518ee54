"""The page's group of one predicted step: its sections in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.estimation import Estimate, may_reserve
from planner.hardware import Gpu
from planner.ledger import Ledger
from planner.memory.allocator_config import AllocatorConfig
from planner.page.contents import Group
from planner.report.pages.answer import answer
from planner.report.pages.course import step_course
from planner.report.pages.over_time import over_time
from planner.report.pages.peak import peak
from planner.report.pages.predicted_time import predicted_time
from planner.report.pages.totals import totals


@dataclass(frozen=True)
class Step:
    """One estimate with what it was made of. `title` names it beside others on a page;
    `link` is what joins several devices, as `planner estimate --link` takes it. `memory_bytes` is
    what was to be fitted into, `said` how the model was typed, `fields` what of it was."""

    estimate: Estimate
    ledger: Ledger
    gpu: Gpu | None = None
    allocator: AllocatorConfig | None = None
    link: str | None = None
    memory_bytes: int | None = None
    said: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def may_reserve(self) -> int | None:
        """Bytes that the allocator's own options let it reserve; None for no limit."""
        return may_reserve(self.gpu, self.memory_bytes, self.allocator)

    @property
    def title(self) -> str:
        device = f" on {self.gpu.name}" if self.gpu is not None else ""
        return f"{self.estimate.model.title}{device}"


def step_group(step: Step, key: str, title: str = "") -> Group:
    """All sections of a step. `key` is unique on the page: charts and anchors begin with it."""
    course = step_course(step)
    sections = [
        answer(step),
        over_time(step, course, key),
        peak(step, course, key),
        totals(step, key),
        predicted_time(step, key),
    ]
    return Group(key, title, sections)
