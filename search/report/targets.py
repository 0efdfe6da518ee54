"""What a page is asked to show: what a target means, and what no page can hold."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path

from planner.core.errors import UsageError, as_text, shorten
from planner.core.files import NoFileError, named_path
from planner.libraries.resolve import CONFIG_SUFFIXES, resolve_model
from planner.report.settings import describe_setting
from search.report.lead import Subject
from search.report.reading import is_run
from search.report.run import Run

MOST_SUBJECTS = 100  # that one page compares: more is a table of `planner estimate`
WHAT_A_RUN_IS = (
    "A RUN is the --output of a 'planner tune'; a MODEL is LIBRARY:NAME, see 'planner models'."
)


def check_target(target: str) -> None:
    """Raises UsageError where a target is neither a run nor a model."""
    named_path(target, "target")
    if is_run(target) or ":" in target:  # LIBRARY:NAME and factories say themselves what is wrong
        return
    if _is_path(target):
        if not Path(target).exists():
            raise UsageError(f"{_shown(target)} does not exist.", WHAT_A_RUN_IS)
        if not target.lower().endswith(CONFIG_SUFFIXES):
            raise UsageError(f"{_shown(target)} is neither a run nor a model.", WHAT_A_RUN_IS)
        return
    try:
        resolve_model(target)
    except NoFileError:
        raise
    except UsageError as error:
        raise UsageError(error.message, WHAT_A_RUN_IS) from None


def check_options(given: Mapping[str, object], targets: Sequence[str]) -> None:
    """Raises UsageError for options (by name, as they are typed) that have no effect: `given` are
    those of a MODEL and "--study-name", where they were given."""
    kinds = {is_run(target) for target in targets}
    of_model = [option for option, value in given.items() if value and option != "--study-name"]
    if kinds == {True} and of_model:
        raise UsageError(
            f"{', '.join(of_model)}: nothing is estimated, since only runs are named.",
            "Omit it, or name a MODEL beside the RUN.",
        )
    if kinds == {False} and given.get("--study-name"):
        raise UsageError(
            "--study-name is for the study of a RUN, and only models are named.", "Omit it."
        )


def check_subjects(subjects: Iterable[Subject]) -> list[Subject]:
    """The same. Raises UsageError where one is there twice, or where they are too many to see."""
    found: dict[Hashable, Subject] = {}
    for subject in subjects:
        identity = _identity(subject)
        if identity in found:
            raise UsageError(f"{_named(subject)} is named twice.", "Name each once.")
        found[identity] = subject
        if len(found) > MOST_SUBJECTS:
            raise UsageError(
                f"a page compares {MOST_SUBJECTS} estimates and runs at most, and more were named.",
                "Name fewer values; 'planner estimate' prints a table of any number.",
            )
    return list(found.values())


def _identity(subject: Subject) -> Hashable:
    if isinstance(subject, Run):
        return str(subject.folder.resolve()), subject.name
    estimate = subject.estimate
    card = subject.gpu.name if subject.gpu is not None else ""
    return (
        estimate.model.model_dump_json(), estimate.setting.model_dump_json(), card,
        estimate.budget_bytes, repr(subject.allocator), subject.link,
    )  # fmt: skip


def _named(subject: Subject) -> str:
    if isinstance(subject, Run):
        return f"the run {_shown(subject.title)}"
    estimate = subject.estimate
    return f"{subject.title} with {describe_setting(estimate.setting, estimate.model)}"


def _is_path(target: str) -> bool:
    """Whether a target is written as a path, or is one."""
    written = os.sep in target or target.startswith((".", "~")) or Path(target).suffix == ".html"
    return written or target.lower().endswith(CONFIG_SUFFIXES) or Path(target).exists()


def _shown(path: str) -> str:
    return shorten(as_text(path))
