"""Where the time of a step goes, as text: three lines, or three tables."""

from __future__ import annotations

from collections.abc import Mapping

from planner.core.units import format_seconds
from planner.report.terminal import table_text
from planner.throughput.parts import Accounts

# What is less than this share of a step is not named in a line.
_LEAST_NAMED = 1 / 200


def time_lines(whose: str, step: Accounts) -> list[str]:
    """Where the time of a step goes: by what limits it, by operation and by phase."""
    return [
        f"{bound_text(whose, step.bound_seconds)}.",
        f"By operation: {shares(step.kind_seconds)}.",
        f"By phase: {shares(step.phase_seconds)}.",
    ]


def bound_text(whose: str, seconds: Mapping[str, float]) -> str:
    """What a step waits for, in the words of every command."""
    return f"What limits {whose}, in shares of its time: {shares(seconds)}"


def shares(seconds: Mapping[str, float]) -> str:
    """`bandwidth 61%, matrix units 30%`: the parts of a step, the largest first."""
    total = sum(seconds.values())
    return ", ".join(
        f"{name} {part / total:.0%}"
        for name, part in ranked(seconds)
        if part >= total * _LEAST_NAMED
    )


def ranked(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])


def time_tables(whose: str, step: Accounts) -> str:
    """Seconds and share of each phase, then of each kind of operation with what bounds it."""
    by_phase = _rows(step.phase_seconds, {})
    by_kind = _rows(step.kind_seconds, {k: shares(step.bounds_of(k)) for k in step.kind_seconds})
    return "\n\n".join(
        [
            f"The time of {whose}, predicted, by phase:\n{_table(by_phase, ['phase'])}",
            "By kind of operation, and what limits each:\n"
            + _table(by_kind, ["operation", "limited by"]),
        ]
    )


def _rows(seconds: Mapping[str, float], notes: Mapping[str, str]) -> list[list[str]]:
    total = sum(seconds.values())
    return [
        [name, format_seconds(part), f"{part / total:.1%}", notes.get(name, "")]
        for name, part in ranked(seconds)
    ]


def _table(rows: list[list[str]], names: list[str]) -> str:
    headers = [names[0], "time", "share", *names[1:]]
    return table_text([row[: len(headers)] for row in rows], headers, "lrrl")
