"""How commands print: one JSON object and nothing else, or a table a person can read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from planner.errors import printable


def print_json(data: Any) -> None:
    """`data` as one JSON value on standard output."""
    click.echo(json.dumps(data, indent=2))


def print_table(rows: Sequence[Sequence[object]], headers: Sequence[str]) -> None:
    """`rows` under `headers`, numbers aligned; None is shown as `-`."""
    from tabulate import tabulate

    say(tabulate(rows, headers=headers, tablefmt="simple", missingval="-"))


def say(text: str = "") -> None:
    """A line for a person; names and messages of others cannot steer the terminal by it."""
    click.echo(printable(text))
