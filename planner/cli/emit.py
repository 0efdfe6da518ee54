"""`planner emit`: a result in a trainer's own words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from planner.emit import TARGETS
from planner.errors import PlannerError, UsageError

if TYPE_CHECKING:
    from planner.emit import Emitted


@click.command()
@click.argument("result", type=click.Path(path_type=Path))
@click.option(
    "--for", "target", required=True, metavar="TRAINER", help=f"One of {', '.join(TARGETS)}."
)
@click.option(
    "--output", type=click.Path(path_type=Path), help="Write here (a file or a directory)."
)
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="FIELD=VALUE",
    help="A field of the setting to change; what is written was then not measured.",
)
def command(result: Path, target: str, output: Path | None, changes: tuple[str, ...]) -> None:
    """Write RESULT, a recommendation.json or the directory of a `planner tune`, for a trainer.

    The file goes to standard output, or with --output to a file (and, where the trainer needs
    Python of yours beside it, that to a second one). Warnings go to standard error.
    """
    from planner.emit import emit

    emitted = emit(result, target, changes=dict(_change(text) for text in changes))
    if output is None:
        click.echo(emitted.text, nl=False)
        _say(emitted, None)
    else:
        _say(emitted, _write(emitted, output))


def _change(text: str) -> tuple[str, str]:
    field, equals, value = text.partition("=")
    if not equals or not field.strip():
        raise UsageError(
            f"--set takes FIELD=VALUE, and {text!r} is not.", "Write --set precision=fp16."
        )
    return field.strip(), value.strip()


def _write(emitted: Emitted, output: Path) -> list[Path]:
    """Writes the file, and the code beside it; returns their paths."""
    into_directory = output.is_dir() or not output.suffix
    file = output / emitted.filename if into_directory else output
    contents = {file: emitted.text}
    if emitted.code:
        contents[file.parent / emitted.code_filename] = emitted.code
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        for path, text in contents.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlannerError(f"{file} cannot be written: {error.strerror}.") from None
    return list(contents)


def _say(emitted: Emitted, written: list[Path] | None) -> None:
    for warning in emitted.warnings:
        click.echo(f"Warning: {warning}", err=True)
    if written is not None:
        click.echo(f"Wrote {' and '.join(map(str, written))}.", err=True)
    elif emitted.code:
        click.echo(
            f"Not shown: {emitted.code_filename}, the model and the optimizer for your script; "
            "--output DIR writes both.",
            err=True,
        )
    click.echo(f"Run: {emitted.launch}", err=True)
