"""`search.write_report`: a page of runs and models in one call, and what no page can hold."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.core.errors import PlannerError, UsageError, as_text, refuse_if, shorten
from planner.core.files import (
    MAX_RESULT_BYTES,
    check_output,
    named_path,
    parse_json,
    read_text,
    unwritable,
    write_output,
)
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
from planner.estimation.kept import is_predicted
from planner.estimation.ledgers import step_ledger
from planner.libraries.resolve import CONFIG_SUFFIXES, resolve_model
from planner.machine.hardware import Gpu
from planner.memory.allocator_config import AllocatorConfig
from planner.report.page.contents import Page
from planner.report.page.rendering import is_page, page_html
from planner.report.pages import Subject, make_page
from planner.report.searches import Run
from planner.report.settings import describe_setting
from planner.report.step import Step
from search.runs.reading import is_run, read_run, refuse_storage

Target = ModelLike | Run | Step
_SNIFFED = 2000  # bytes of a file, in which a page says that it is one
MOST_SUBJECTS = 100  # that one page compares: more is a table of `planner estimate`
WHAT_A_RUN_IS = (
    "A RUN is the --output of a 'planner tune'; a MODEL is LIBRARY:NAME, see 'planner models'."
)


def write_report(
    targets: Target | Sequence[Target],
    output: str | os.PathLike[str] = "report.html",
    *,
    title: str = "",
    force: bool = False,
    gpu: str | Gpu | Sequence[str | Gpu] | None = None,
    memory_bytes: int | str | None = None,
    allocator: str | AllocatorConfig | None = None,
    recorded: bool = False,
    link: str | None = None,
    **overrides: Any,
) -> Path:
    """One HTML page of `targets`, as `planner report` writes it; returns its path.

    A target is a run (the `output` of `search.tune`), a model as
    `planner.estimate` takes it, or what `report_estimate` made. Models are estimated on each `gpu`,
    with the options of `planner.estimate`. `force` replaces a file that is no page of ours.

    Raises UsageError and PlannerError, before anything is estimated where it can.
    """
    several = isinstance(targets, Sequence) and not isinstance(targets, str)
    listed: list[Target] = list(targets) if several else [targets]  # type: ignore[arg-type,list-item]
    if not listed:
        raise UsageError("a report needs a run or a model.", "Name one at least.")
    path = check_page(output, force)
    names = [os.fspath(t) for t in listed if isinstance(t, str | os.PathLike)]
    for name in names:
        check_target(name)
    cards = list(gpu) if isinstance(gpu, Sequence) and not isinstance(gpu, str) else [gpu]
    options: dict[str, Any] = {
        "memory_bytes": memory_bytes, "allocator": allocator, "recorded": recorded, "link": link,
        **overrides,
    }  # fmt: skip
    if len(names) == len(listed):
        check_options({"gpu": gpu, **options}, names)
    subjects: list[Subject] = []
    for target in listed:
        if isinstance(target, Run | Step):
            subjects.append(target)
        elif isinstance(target, str | os.PathLike) and is_run(os.fspath(target)):
            subjects.append(read_run(os.fspath(target)))
        else:
            subjects += [report_estimate(target, gpu=card, **options) for card in cards]
    check_subjects(subjects)
    return write_page(make_page(subjects, title), path, force)


def report_estimate(
    model: ModelLike,
    setting: SettingLike | None = None,
    *,
    gpu: str | Gpu | None = None,
    memory_bytes: int | str | None = None,
    allocator: str | AllocatorConfig | None = None,
    recorded: bool = False,
    link: str | None = None,
    **overrides: Any,
) -> Step:
    """An estimate with what it was made of, for `write_report`; takes what `planner.estimate`
    takes."""
    device, memory, options = read_gpu(gpu), read_memory(memory_bytes), allocator_here(allocator)
    config, chosen = choose(model, setting, device, overrides)
    step = step_of(config, chosen, device, memory, options, link, recorded)
    typed = {name: str(value) for name, value in overrides.items() if name in MODEL_FIELDS}
    return replace(step, said=model if isinstance(model, str) else "", fields=typed)


def step_of(
    model: Model,
    setting: ResolvedSetting,
    gpu: Gpu | None,
    memory_bytes: int | None,
    allocator: AllocatorConfig | None,
    link: str | None,
    recorded: bool,
) -> Step:
    """One estimate."""
    ledger = step_ledger(model, setting, recorded, gpu)
    found = estimate_ledger(model, setting, ledger, gpu, memory_bytes, allocator, link=link)
    return Step(found, ledger, gpu, allocator, link, memory_bytes)


def check_target(target: str) -> None:
    """Raises UsageError where a target is neither a run nor a model."""
    path = named_path(target, "target")
    refuse_storage(target)
    if is_run(target) or ":" in target:  # LIBRARY:NAME and factories say themselves what is wrong
        return
    if path.suffix == ".json" and path.is_file():
        shown = shorten(as_text(target))
        refuse_if(
            is_predicted(parse_json(read_text(path, MAX_RESULT_BYTES), shown)),
            f"{shown} holds an estimate or advice, and a page draws a run or a model.",
            "Write: planner report MODEL, with the options of 'planner estimate'.",
        )
    if path.exists() and target.lower().endswith(CONFIG_SUFFIXES):  # options may still mend it
        return
    try:
        resolve_model(target)
    except UsageError as error:
        raise UsageError(error.message, WHAT_A_RUN_IS) from None


def check_options(given: Mapping[str, object], targets: Sequence[str]) -> None:
    """Raises UsageError for options (by name, as they are typed) of a MODEL where none is named."""
    idle = [option for option, value in given.items() if value]
    refuse_if(
        bool(idle) and all(map(is_run, targets)),
        f"{', '.join(idle)}: nothing is estimated, since only runs are named.",
        "Omit it, or name a MODEL beside the RUN.",
    )


def check_subjects(subjects: Sequence[Subject]) -> None:
    """Raises UsageError where one is there twice, or where they are too many to see."""
    refuse_if(
        len(subjects) > MOST_SUBJECTS,
        f"a page compares {MOST_SUBJECTS} estimates and runs at most, and more were named.",
        "Name fewer values; 'planner estimate' prints a table of any number.",
    )
    found: set[Hashable] = set()
    for subject in subjects:
        if isinstance(subject, Run):
            identity: Hashable = Path(subject.place).resolve()
            named = f"the run {shorten(as_text(subject.place))}"
        else:
            estimate = subject.estimate
            identity = (repr(estimate), repr(subject.allocator), subject.link)
            setting = describe_setting(estimate.setting, estimate.model)
            named = f"{subject.title} with {setting}"
        refuse_if(identity in found, f"{named} is named twice.", "Name each once.")
        found.add(identity)


def check_page(output: str | os.PathLike[str], force: bool = False) -> Path:
    """The file that a page may be written to.

    Raises as `check_output`, and PlannerError where a file is there that is no page of ours and
    `force` does not say to replace it.
    """
    path = check_output(output, "a page", (".html", ".htm"))
    shown = shorten(as_text(str(path)))
    try:
        if path.exists() and not path.is_file():
            raise PlannerError(f"{shown} is no file that can be replaced.", "Name another file.")
        if not force and (path.is_symlink() or (path.exists() and _is_anothers(path))):
            raise PlannerError(
                f"{shown} exists, and 'planner report' did not write it.",
                "Name another file, or remove this one ('planner report --force' replaces it).",
            )
    except OSError as error:
        raise unwritable(path, error) from None
    return path


def _is_anothers(path: Path) -> bool:
    """Whether somebody would miss it: anything that is neither empty nor a page."""
    with path.open("rb") as file:
        start = file.read(_SNIFFED)
    return bool(start) and not is_page(start.decode(errors="replace"))


def write_page(page: Page, output: str | os.PathLike[str], force: bool = False) -> Path:
    """Writes the page, whole or not at all. Raises what `check_page` raises."""
    return write_output(check_page(output, force), page_html(page).encode())
