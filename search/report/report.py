"""`search.write_report`: a page of runs and models in one call."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.core.errors import UsageError
from planner.core.schema import Model, ResolvedSetting
from planner.estimation.arguments import (
    MODEL_FIELDS,
    ModelLike,
    SettingLike,
    allocator_here,
    read_gpu,
    read_memory,
)
from planner.estimation.estimate import choose, estimate_ledger
from planner.estimation.ledgers import step_ledger
from planner.machine.hardware import Gpu
from planner.memory.allocator_config import AllocatorConfig
from planner.report.pages.step import Step
from search.report.lead import Subject
from search.report.output import check_page, write_page
from search.report.reading import is_run, read_run
from search.report.run import Run
from search.report.targets import check_options, check_subjects, check_target
from search.report.writing import make_page

Target = ModelLike | Run | Step


def write_report(
    targets: Target | Sequence[Target],
    output: str | os.PathLike[str] = "report.html",
    *,
    title: str = "",
    force: bool = False,
    study_name: str | None = None,
    gpu: str | Gpu | Sequence[str | Gpu] | None = None,
    memory_bytes: int | str | None = None,
    allocator: str | AllocatorConfig | None = None,
    traced: bool = False,
    link: str | None = None,
    **overrides: Any,
) -> Path:
    """One HTML page of `targets`, as `planner report` writes it; returns its path.

    A target is a run (the `output` of `search.tune`), a model as
    `planner.estimate` takes it, or what `report_estimate` made. Models are estimated on each `gpu`,
    with the options of `planner.estimate`. `force` replaces a file that is no page of ours.

    Raises UsageError and PlannerError, before anything is estimated where it can.
    """
    listed = _listed(targets)
    if not listed:
        raise UsageError("a report needs a run or a model.", "Name one at least.")
    path = check_page(output, force)
    names = [os.fspath(t) for t in listed if isinstance(t, str | os.PathLike)]
    for name in names:
        check_target(name)
    cards = list(gpu) if isinstance(gpu, Sequence) and not isinstance(gpu, str) else [gpu]
    given = {
        "gpu": gpu, "memory_bytes": memory_bytes, "allocator": allocator, "traced": traced,
        "link": link, **overrides,
    }  # fmt: skip
    if len(names) == len(listed):
        check_options(given, names)
    subjects: list[Subject] = []
    for target in listed:
        if isinstance(target, Run | Step):
            subjects.append(target)
        elif isinstance(target, str | os.PathLike) and is_run(os.fspath(target)):
            subjects.append(read_run(os.fspath(target), study_name))
        else:
            subjects += [
                report_estimate(
                    target, gpu=card, memory_bytes=memory_bytes, allocator=allocator,
                    traced=traced, link=link, **overrides,
                )
                for card in cards
            ]  # fmt: skip
    return write_page(make_page(check_subjects(subjects), title), path, force)


def report_estimate(
    model: ModelLike,
    setting: SettingLike | None = None,
    *,
    gpu: str | Gpu | None = None,
    memory_bytes: int | str | None = None,
    allocator: str | AllocatorConfig | None = None,
    traced: bool = False,
    link: str | None = None,
    **overrides: Any,
) -> Step:
    """An estimate with what it was made of, for `write_report`; takes what `planner.estimate`
    takes."""
    device, memory, options = read_gpu(gpu), read_memory(memory_bytes), allocator_here(allocator)
    config, chosen = choose(model, setting, device, overrides)
    step = step_of(config, chosen, device, memory, options, link, traced)
    typed = {name: str(value) for name, value in overrides.items() if name in MODEL_FIELDS}
    return replace(step, said=model if isinstance(model, str) else "", fields=typed)


def step_of(
    model: Model,
    setting: ResolvedSetting,
    gpu: Gpu | None,
    memory_bytes: int | None,
    allocator: AllocatorConfig | None,
    link: str | None,
    traced: bool,
) -> Step:
    """One estimate."""
    ledger = step_ledger(model, setting, traced)
    found = estimate_ledger(model, setting, ledger, gpu, memory_bytes, allocator, link=link)
    return Step(found, ledger, gpu, allocator, link, memory_bytes)


def _listed(targets: Target | Sequence[Target]) -> list[Target]:
    """One target or several, as a list."""
    if isinstance(targets, Sequence) and not isinstance(targets, str):
        return list(targets)
    return [targets]
