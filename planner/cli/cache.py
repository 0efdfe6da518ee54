"""`planner cache`: what was traced and is kept, and the way to be rid of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from planner.cli.command import Command
from planner.cli.output import print_json, say
from planner.core.errors import PlannerError
from planner.core.units import format_bytes, format_seconds
from planner.ledger import cache as ledger_cache
from planner.ledger.cache import Entry
from planner.ledger.key import ANY_BATCH
from planner.report.text import table_text

HEADERS = ("model", "kept", "setting", "size", "last used")


@click.command(cls=Command, examples=("planner cache", "planner cache --clear"))
@click.option("--clear", is_flag=True, help="Remove everything that is listed.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array (bytes, seconds).")
def command(clear: bool, as_json: bool) -> None:
    """List the kept traces, from which estimates are answered without torch."""
    where = ledger_cache.folder()
    if clear:
        say(f"Removed {_counted(_clear(where))} from {where}.")
        return
    found = ledger_cache.entries()
    if as_json:
        print_json([_as_json(entry) for entry in found])
        return
    if found:
        say(f"{table_text([_row(entry) for entry in found], HEADERS)}\n")
    size = format_bytes(sum(entry.num_bytes for entry in found))
    most = format_bytes(ledger_cache.MAX_CACHE_BYTES)
    say(
        f"{_counted(len(found))} in {where}: {size} of at most {most}; the least recently used "
        "go first."
    )


def _clear(where: Path) -> int:
    try:
        return ledger_cache.clear()
    except OSError as error:
        raise PlannerError(f"{where} cannot be cleared: {error.strerror}.") from error


def _counted(number: int) -> str:
    return f"{number} {'entry' if number == 1 else 'entries'}"


def _row(entry: Entry) -> tuple[str, str, str, str, str]:
    age = max(time.time() - entry.used, 0.0)
    return (
        entry.key["title"],
        _what(entry.key),
        _setting(entry.key),
        format_bytes(entry.num_bytes),
        f"{format_seconds(age)} ago",
    )


def _what(key: dict[str, Any]) -> str:
    if "name" in key:
        return "the model's description"
    batch = key["batch"]
    return "a step at any batch above 1" if batch == ANY_BATCH else f"a step at batch {batch}"


def _setting(key: dict[str, Any]) -> str:
    if "setting" not in key:
        return ""
    from planner.core.schema import TrainSetting
    from planner.report.settings import describe_setting

    return describe_setting(TrainSetting(**key["setting"])).partition(", ")[2]


def _as_json(entry: Entry) -> dict[str, Any]:
    return {
        "file": str(entry.path),
        "key": entry.key,
        "bytes": entry.num_bytes,
        "unused_seconds": max(time.time() - entry.used, 0.0),
    }
