"""`planner data`: how fast this machine feeds a training, found by short probes of real loaders."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from planner.cli.arguments import refuse_empty, with_options
from planner.cli.command import Command
from planner.cli.progress import quiet_flag
from planner.cli.search_flags import said_options, search_flags
from planner.core.errors import UsageError
from search import check_platform
from search.loader.options import LoaderOptions

_OPTIONS: list[Callable[[Any], Any]] = [
    click.argument("data", metavar="DIR|MODULE:FACTORY", required=False),
    click.option("--for", "model", metavar="MODEL", help="Model to feed: LIBRARY:NAME or a file."),
    click.option("--gpu", metavar="NAME", help="Also predict the step of --for on this GPU."),
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
    from planner.cli.searching import search_and_print
    from planner.report.data import data_text
    from search.loader.finding import find_loader, read_question

    refuse_empty(given)
    options: Any = dict(said_options(LoaderOptions, given))
    model, gpu = given["model"], given["gpu"]
    read_question(model, gpu, options)  # before any picture is made
    return search_and_print(
        lambda on_progress: find_loader(
            _data(given["data"], given["synthetic"]),
            model=model, gpu=gpu, on_progress=on_progress, **options,
        ),
        f"planner data {given['data'] or 'of its own pictures'}",
        data_text,
        lambda found: found.setting is not None,
        given["quiet"],
        given["as_json"],
    )  # fmt: skip


def _data(named: str | None, synthetic: int | None) -> Any:
    """The data that were named, or made. Raises UsageError."""
    if synthetic is None:
        if named is None:
            raise UsageError(
                "no data were named.",
                "Pass a folder of pictures or MODULE:FACTORY, or --synthetic 2000 to make some.",
            )
        return named
    from planner.training.loading.synthetic import make_synthetic

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
