"""How `planner validate` prints a list of what is to be done, and what was seen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.schema.observation import ObservationRecord
from planner.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from search.validation.matrix import Matrix, Row

STATUS_WORDS = {
    "seen": "seen", "not_here": "not on this device", "failed": "failed",
    "timed_out": "timed out", "crashed": "crashed",
}  # fmt: skip
# Figures of one observation that a person reads at once; the record holds all.
_SHOWN_FIGURES = 12
_SHOWN_CHARACTERS = 300


def describe_row(row: Row) -> str:
    """A row in words."""
    from planner.report.settings import describe_setting

    return f"{row.model.title}, {describe_setting(row.setting)}"


def print_list(matrix: Matrix, to_see: Sequence[str], left: Sequence[Row], file: Path) -> None:
    """Everything a matrix asks for, in its order, with `ok` before what `file` holds."""
    for observation in matrix.observations:
        done = "  " if observation.name in to_see else "ok"
        click.echo(f"{done} {observation.what} ({observation.name})")
    for row in matrix.rows:
        click.echo(f"{'  ' if row in left else 'ok'} {describe_row(row)}")
    if matrix.observations:
        seen = len(matrix.observations) - len(to_see)
        click.echo(f"{len(matrix.observations)} things to see, {seen} of them in {file}.")
    click.echo(f"{len(matrix.rows)} rows, {len(matrix.rows) - len(left)} of them in {file}.")


def print_observations(records: Sequence[ObservationRecord]) -> None:
    """What was seen, each with its first figures and its message."""
    for record in records:
        rehearsed = ", a rehearsal" if record.rehearsal else ""
        click.echo(
            f"{record.what} ({record.observation}): {STATUS_WORDS[record.status]}, "
            f"{record.device.name}, {record.date[:10]}{rehearsed}"
        )
        for name, value in _flat(record.figures)[:_SHOWN_FIGURES]:
            click.echo(f"  {name.replace('_', ' ')}: {_format(name, value)}")
        if record.message:
            click.echo(f"  {_cut(record.message)}")
        for figure, why in record.not_here.items():
            click.echo(f"  {figure.replace('_', ' ')}: {why}")
    click.echo("")


def _flat(figures: dict[str, Any], within: str = "") -> list[tuple[str, Any]]:
    """Figures within figures, each by its whole name."""
    found: list[tuple[str, Any]] = []
    for name, value in figures.items():
        if isinstance(value, dict):
            found += _flat(value, f"{within}{name} ")
        else:
            found.append((f"{within}{name}", value))
    return found


def _format(name: str, value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and name.endswith("_bytes"):
        return format_bytes(value)
    if isinstance(value, float) and name.endswith("_seconds"):
        return format_seconds(value)
    return _cut(str(value))


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]} …"
