"""How commands print: one JSON object and nothing else, or a table a person can read."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click

from planner.core.errors import printable
from planner.core.files import to_json

VERDICTS = {
    "Fits for": "yellow", "Fits": "green", "Recommended": "green", "Probably fits": "yellow",
    "Probably does not": "red", "Does not fit": "red", "Nothing fits": "red",
    "Probably nothing": "red",
}  # fmt: skip


def print_json(data: Any) -> None:
    """`data` as one JSON value on standard output."""
    click.echo(json.dumps(to_json(data), indent=2))


def tell(text: str) -> None:
    """A line on standard error, which names and messages of others cannot steer."""
    click.echo(printable(text), err=True)


def say(text: str = "") -> None:
    """Lines for a person, no wider than the terminal; names and messages of others cannot steer it
    by them. Their first is bold on a terminal, and coloured where it is a verdict."""
    from planner.report.text import fitted

    first, newline, rest = fitted(printable(text)).partition("\n")
    plain = {"NO_COLOR", "CI"} & {n for n, v in os.environ.items() if v}
    if newline and sys.stdout.isatty() and not plain and os.environ.get("TERM", "dumb") != "dumb":
        colour = next((c for word, c in VERDICTS.items() if first.startswith(word)), None)
        first = click.style(first, bold=True, fg=colour)
    click.echo(f"{first}{newline}{rest}")
