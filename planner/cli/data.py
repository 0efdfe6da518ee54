"""`planner data`: how fast this machine feeds a training, found by short probes of real loaders."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from planner.cli.arguments import refuse_empty, with_options
from planner.cli.command import Command
from planner.cli.output import print_json, say
from planner.cli.progress import quiet_flag, show_on
from planner.cli.search_flags import said_options, search_flags
from planner.errors import UsageError
from search import check_platform
from search.loader.options import LoaderOptions

NOTHING_LOADS = 1

_OPTIONS: list[Callable[[Any], Any]] = [
    click.argument("data", metavar="DIR|MODULE:FACTORY", required=False),
    click.option("--for", "model", metavar="MODEL", help="Whose images: LIBRARY:NAME or a file."),
    click.option("--gpu", metavar="NAME", help="Also predict what the step of --for takes on it."),
    click.option("--synthetic", type=click.IntRange(1), metavar="N",
                 help="Make N pictures first: in DIR, or in a temporary folder."),
    *search_flags(LoaderOptions),
    quiet_flag,
    click.option("--json", "as_json", is_flag=True, help="Print data.json."),
]  # fmt: skip


@click.command(
    cls=Command,
    examples=(
        "planner data pictures --for native:swin_tiny --output fed",
        "planner data --synthetic 2000 --batch-size 64",
    ),
)
@with_options(_OPTIONS)
def command(**given: Any) -> int:
    """Find how fast this machine feeds a training, by short probes of real data loaders.

    The data are a folder with a folder of pictures per class, tar shards, a table of datasets, or
    package.module:factory, which returns a Dataset. Nothing is written into them. Run the same
    command again to continue where it stopped; Ctrl-C ends it with the best loader so far.
    """
    check_platform()
    from planner.report.data import data_text
    from search.interrupts import heard
    from search.loader.finding import find_loader, read_question
    from search.result_file import ResultNotWrittenError

    refuse_empty(given)
    options: Any = dict(said_options(LoaderOptions, given))
    read_question(given["model"], given["gpu"], options)  # before any picture is made
    heading = f"planner data {given['data'] or 'of its own pictures'}"
    with heard(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as interrupts:
        unwritten: ResultNotWrittenError | None = None
        try:
            with show_on(heading, given["quiet"]) as show:
                found = find_loader(
                    _data(given["data"], given["synthetic"]),
                    model=given["model"],
                    gpu=given["gpu"],
                    on_progress=show.hear,
                    **options,
                )
        except KeyboardInterrupt:
            click.echo("Error: interrupted before anything was found.", err=True)
            return interrupts.exit_status
        except ResultNotWrittenError as error:
            found, unwritten = error.recommendation, error
        if given["as_json"]:
            print_json(found.model_dump(mode="json"))
        else:
            say("\n" + data_text(found))
        if interrupts.number is not None:
            return interrupts.exit_status
    if unwritten is not None:
        raise unwritten
    return 0 if found.setting is not None else NOTHING_LOADS


def _data(named: str | None, synthetic: int | None) -> Any:
    """The data that were named, or made. Raises UsageError."""
    if synthetic is None:
        if named is None:
            raise UsageError(
                "no data were named.",
                "Pass a folder of pictures or MODULE:FACTORY, or --synthetic 2000 to make some.",
            )
        return named
    from planner.loading.synthetic import make_synthetic

    folder = _temporary(synthetic) if named is None else Path(named)
    return make_synthetic(folder, synthetic)


def _temporary(count: int) -> Path:
    """A folder that only we can read, the same for the same count: a search goes on from it."""
    folder = Path(tempfile.gettempdir()) / f"planner-pictures-{os.getuid()}-{count}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        owner = folder.lstat().st_uid
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be made a folder: {error.strerror}.", "Name a DIR."
        ) from None
    if folder.is_symlink() or owner != os.getuid():
        raise UsageError(f"{folder} is another user's.", "Name a DIR for --synthetic.")
    return folder
