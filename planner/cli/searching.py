"""The frame of a command that searches: it shows how far it is, prints what it found, ends in
order."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TypeVar

import click
from pydantic import BaseModel

from planner.cli.output import print_json, say
from planner.cli.progress import show_on
from search.loop.interrupts import handle_signals
from search.loop.progress import OnProgress
from search.loop.result_file import ResultNotWrittenError

NOTHING_FOUND = 1  # the exit status

FoundT = TypeVar("FoundT", bound=BaseModel)


def search_and_print(
    find: Callable[[OnProgress], FoundT],
    heading: str,
    text: Callable[[FoundT], str],
    is_found: Callable[[FoundT], bool],
    quiet: bool,
    as_json: bool,
) -> int:
    """Runs `find` under a live table and prints what it returns, as `text` or as JSON.

    The exit status is 0 where something was found and 1 where nothing was; that of the signal that
    ended the search, whose best so far is printed. Raises ResultNotWrittenError once what was found
    is printed.
    """
    with handle_signals(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as interrupts:
        unwritten: ResultNotWrittenError | None = None
        try:
            with show_on(heading, quiet) as show:
                found = find(show.hear)
        except KeyboardInterrupt:
            click.echo("Error: interrupted before anything was found.", err=True)
            return interrupts.exit_status
        except ResultNotWrittenError as error:
            found, unwritten = error.recommendation, error
        if as_json:
            print_json(found.model_dump(mode="json"))
        else:
            say("\n" + text(found))
        if interrupts.number is not None:
            return interrupts.exit_status
    if unwritten is not None:
        raise unwritten
    return 0 if is_found(found) else NOTHING_FOUND
