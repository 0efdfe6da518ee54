"""The page's group of one predicted step: its sections in order."""

from __future__ import annotations

from dataclasses import dataclass

from planner.estimation import Estimate
from planner.hardware import Gpu
from planner.ledger import Ledger
from planner.memory.allocator_config import AllocatorConfig
from planner.page.contents import Facts, Group, Section, Text
from planner.report.pages.predicted_time import predicted_time
from planner.report.settings import describe_setting
from planner.report.tables import verdict
from planner.units import format_bytes


@dataclass(frozen=True)
class Step:
    """One estimate with what it was made of. `title` names it beside others on a page;
    `link` is what joins several devices, as `planner estimate --link` takes it."""

    estimate: Estimate
    ledger: Ledger
    gpu: Gpu | None = None
    allocator: AllocatorConfig | None = None
    link: str | None = None

    @property
    def title(self) -> str:
        device = f" on {self.gpu.name}" if self.gpu is not None else ""
        return f"{self.estimate.model.title}{device}"


def step_group(step: Step, key: str, title: str = "") -> Group:
    """All sections of a step. `key` is unique on the page: charts and anchors begin with it."""
    sections = [answer(step), totals(step, key), predicted_time(step, key)]
    return Group(key, title, sections)


def answer(step: Step) -> Section:
    """The setting, the verdict and the rate."""
    estimate = step.estimate
    return Section(
        "answer",
        "Answer",
        [
            Text(verdict(estimate), "lead"),
            Facts([("Setting", describe_setting(estimate.setting)), ("Peak", estimate.peak_at)]),
        ],
    )


def totals(step: Step, key: str) -> Section:
    """Allocated, reserved and device."""
    estimate = step.estimate
    return Section(
        "totals",
        "Allocated, reserved, device",
        [
            Facts(
                [
                    ("Allocated", format_bytes(estimate.peak_allocated_bytes)),
                    ("Reserved", format_bytes(estimate.peak_reserved_bytes)),
                    ("Device", format_bytes(estimate.device_total_bytes)),
                ]
            )
        ],
    )
