"""A section that is made once for each model and device of a run."""

from __future__ import annotations

from collections.abc import Callable

from planner.report.page.contents import Part, Section, Text
from search.report.run import Run


def section_of(
    run: Run, key: str, name: str, title: str, make: Callable[[Run, str], list[Part]]
) -> list[Section]:
    """One section of what `make` says of each part of a run, under its name where there are
    several; none where it says nothing."""
    parts: list[Part] = []
    several = len(run.parts) > 1
    for number, part in enumerate(run.parts, start=1):
        found = make(part, f"{key}-{number}" if several else key)
        if found and several:
            parts.append(Text(part.title, "lead"))
        parts += found
    return [Section(name, title, parts)] if parts else []
