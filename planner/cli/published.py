"""What `planner validate --published FILE` prints: others' measurements beside our predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.cli.output import print_json, print_table

if TYPE_CHECKING:
    from search.validation.published import Published, PublishedRow

INSTANTS = {"first": ", first step", "steady": ""}


def print_published(file: str, as_json: bool) -> None:
    """Every row of `file` beside the estimate: memory, then time, then how far off in all."""
    from search.validation.published import compare_published, read_published

    found = compare_published(read_published(Path(file)))
    if as_json:
        print_json([_as_json(p) for p in found])
        return
    _print_memory([p for p in found if p.memory_error is not None])
    click.echo("")
    _print_device([p for p in found if p.device_error is not None])
    click.echo("")
    _print_time([p for p in found if p.time_error is not None])
    click.echo("")
    _print_summary(found)


def _print_memory(found: Sequence[Published]) -> None:
    rows = [
        (p.row.id, _conditions(p.row) + INSTANTS[p.row.instant], _mebibytes(p),
         _percent(p.memory_error), _standing(p.row.why_memory_is_only_listed, "held"))
        for p in found
    ]  # fmt: skip
    print_table(rows, ("max_memory_allocated", "conditions", "measured", "off", ""))


def _print_device(found: Sequence[Published]) -> None:
    rows = [
        (p.row.id, _conditions(p.row), f"{p.row.device_gib:.1f} GiB", _percent(p.device_error),
         "only listed: an upper bound")
        for p in found
    ]  # fmt: skip
    print_table(rows, ("nvidia-smi", "conditions", "measured", "off", ""))


def _print_time(found: Sequence[Published]) -> None:
    rows = [
        (p.row.id, p.row.gpu, _conditions(p.row), f"{p.row.images_per_second:.0f} images/s",
         _percent(p.time_error),
         _standing(p.row.why_time_is_only_listed, "held out" if p.row.is_held_out else "fitted"))
        for p in found
    ]  # fmt: skip
    print_table(rows, ("rate", "card", "conditions", "measured", "off", ""))


def _print_summary(found: Sequence[Published]) -> None:
    from search.validation.compare import accuracy_of

    groups: tuple[tuple[str, Callable[[Published], float | None]], ...] = (
        ("memory, held",
         lambda p: p.memory_error if p.row.why_memory_is_only_listed is None else None),
        ("rate, fitted", lambda p: _judging(p) if not p.row.is_held_out else None),
        ("rate, held out", lambda p: _judging(p) if p.row.is_held_out else None),
        ("of these, with a backward",
         lambda p: _judging(p) if p.row.is_held_out and p.row.span != "forward" else None),
    )  # fmt: skip
    rows = []
    for title, error in groups:
        summary = accuracy_of([e for p in found if (e := error(p)) is not None])
        if summary is not None:
            rows.append((title, summary.count, f"{summary.median:.1%}", f"{summary.worst:.1%}"))
    print_table(rows, ("", "rows", "median error", "worst error"))
    kept = [p.row.id for p in found if p.row.figures]
    if kept:
        click.echo(f"\nKept, and compared with nothing: {', '.join(kept)}.")


def _judging(found: Published) -> float | None:
    return found.time_error if found.row.why_time_is_only_listed is None else None


def _conditions(row: PublishedRow) -> str:
    _, setting = row.resolved
    parts = [row.span, f"batch {setting.batch_size}", setting.precision]
    if setting.attention != "eager":
        parts.append(setting.attention)
    if setting.parallelism == "ddp":
        parts.append(f"DDP on {setting.world_size}")
    return ", ".join([*parts, f"torch {row.torch or '?'}"])


def _standing(why_only_listed: str | None, otherwise: str) -> str:
    return otherwise if why_only_listed is None else f"only listed: {why_only_listed}"


def _mebibytes(found: Published) -> str:
    return f"{found.row.allocated_mib:.0f} MiB"


def _percent(error: float | None) -> str | None:
    return None if error is None else f"{error:+.1%}"


def _as_json(found: Published) -> dict[str, Any]:
    return {
        **found.row.model_dump(mode="json", exclude_none=True),
        "held_out": found.row.is_held_out,
        "memory_only_listed": found.row.why_memory_is_only_listed,
        "time_only_listed": found.row.why_time_is_only_listed,
        "predicted_allocated_bytes": found.allocated_bytes,
        "predicted_images_per_second": found.images_per_second,
    }
