"""The page's section of trainers: the recommended setting in each one's own words, to copy."""

from __future__ import annotations

from planner.core.errors import PlannerError
from planner.core.schema import SwinConfig
from planner.core.schema.result import Recommendation
from planner.report.page.contents import Copyable, Part, Section, Tabs, Text
from planner.trainers.emission import TARGETS, emit
from planner.trainers.plan import Emitted
from planner.trainers.registry import TRAINERS
from search.report.run import Run

PLAIN = "pytorch"  # the plain script, which trains whatever was probed


def trainers(run: Run, key: str) -> list[Section]:
    """Each trainer's file; none where nothing is recommended."""
    found = run.found
    if found is None or found.setting is None:
        return []
    tabs = [(target, _parts(found, target)) for target in _in_order(found)]
    said = Text(
        "The recommended setting as each trainer has it. A learning rate in these files is already "
        "scaled to this batch; a note above on scaling one is for a rate of your own.",
        "note",
    )
    return [Section("trainers", "For your trainer", [said, Tabs(f"{key}-trainers", tabs)], False)]


def first_choice(found: Recommendation) -> Emitted | None:
    """The file to begin with: of the trainer that builds the probed library's own model, else the
    plain script; None where every trainer refuses."""
    for target in _in_order(found):
        try:
            return emit(found, target)
        except PlannerError:
            continue
    return None


def _in_order(found: Recommendation) -> list[str]:
    """Those that train what was probed first."""
    library = found.model.library if isinstance(found.model, SwinConfig) else None
    own = [t for t in TARGETS if library is not None and TRAINERS[t].library == library]
    return list(dict.fromkeys([*own, PLAIN, *TARGETS]))


def _parts(found: Recommendation, target: str) -> list[Part]:
    """A trainer's file or files with their warnings, or why there is none."""
    try:
        emitted = emit(found, target)
    except PlannerError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return [Text(f"{target} cannot train this setting.", "warning"), *map(Text, lines)]
    parts: list[Part] = [Text(warning, "warning") for warning in emitted.warnings]
    parts += [
        Copyable(emitted.launch, "Launch"),
        Copyable(emitted.text, emitted.filename),
    ]
    return [*parts, *(Copyable(text, name) for name, text in emitted.beside.items())]
