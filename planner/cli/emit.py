"""`planner emit`: a result in a trainer's own words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from planner.cli.arguments import read_piped, refuse_empty, split_fields, way_flag
from planner.cli.command import Command
from planner.cli.output import tell
from planner.core.errors import PlannerError, UsageError
from planner.core.files import unwritable, write_whole
from planner.trainers.registry import TARGETS, find_trainer

if TYPE_CHECKING:
    from planner.trainers.emission import Emitted


@click.command(
    cls=Command,
    examples=(
        "planner emit run --for timm --output args.yaml",
        "planner emit run --for pytorch --output train.py",
        "planner emit advice.json --way 2 --for transformers",
    ),
)
@click.argument("result", type=click.Path(allow_dash=True))
@click.option("--for", "trainer", metavar="TRAINER", help=f"Required: one of {', '.join(TARGETS)}.")
@way_flag
@click.option("--output", type=click.Path(), help="Write here (a file or a directory).")
@click.option("--force", is_flag=True, help="Also replace files that 'planner emit' did not write.")
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Change a field of the setting; the result is then not measured.",
)
def command(
    result: str, trainer: str | None, way: int | None, output: str | None, force: bool,
    changes: tuple[str, ...],
) -> None:  # fmt: skip
    """Write RESULT for a trainer: the directory of a `planner tune` (or its recommendation.json),
    or what `planner advise` or `planner estimate` printed with --json (- is standard input).

    Where the setting was only predicted, the file and standard error say so. The file goes to
    standard output or to --output (with a second one where the trainer needs Python code beside
    it), warnings to standard error. An earlier output is replaced, any other file only with
    --force.
    """
    from planner.trainers.emission import emit

    if trainer is None:
        raise UsageError("No trainer is named.", f"Add --for with one of {', '.join(TARGETS)}.")
    refuse_empty({"result": result, "for": trainer, "output": output})
    found, changed = read_piped(result), _changes(changes)
    if output is None:
        emitted = emit(found, trainer, way=way, changes=changed)
        click.echo(emitted.text, nl=False)
        _say(emitted, None)
    else:
        file = _file(Path(output), trainer)
        emitted = emit(found, trainer, way=way, changes=changed, output=file)
        _say(emitted, write_files(contents_of(emitted, file), force))


def _file(output: Path, target: str) -> Path:
    """The file meant: `output`, or in a directory the trainer's usual name."""
    try:
        into_directory = output.is_dir() or not (output.suffix or output.exists())
    except OSError as error:
        raise _unwritable(output, error) from None
    return output / find_trainer(target).filename if into_directory else output


def _changes(fields: tuple[str, ...]) -> dict[str, str]:
    """What --set changes in the setting. Raises UsageError."""
    of_model, of_setting = split_fields(fields)
    if of_model:
        raise UsageError(
            f"--set {', '.join(of_model)} would make another model than the one that RESULT is of.",
            "Change fields of the setting only, or tune that model.",
        )
    return of_setting


def contents_of(emitted: Emitted, file: Path) -> dict[Path, str]:
    """What to write where: the file, and what lies beside it.

    Raises UsageError where two would be one file.
    """
    beside = {file.parent / name: text for name, text in emitted.beside.items()}
    if file in beside:
        raise UsageError(
            f"{emitted.target} needs {len(beside) + 1} files, and {file} is one of the others.",
            f"Choose another name, as --output {file.parent / emitted.filename}.",
        )
    return {file: emitted.text, **beside}


def write_files(contents: dict[Path, str], force: bool) -> list[Path]:
    """Writes the files, all or none where one may not be replaced; returns their paths.

    Raises PlannerError where one exists that no `planner emit` wrote, or cannot be written.
    """
    for path in contents:
        try:
            if not force and _is_anothers(path):
                raise PlannerError(
                    f"{path} exists, and 'planner emit' did not write it.",
                    "Choose another --output, or replace it with --force.",
                )
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(path, error) from None
    for path, text in contents.items():
        try:
            _replace(path, text)
        except OSError as error:
            raise _unwritable(path, error) from None
    return list(contents)


def _is_anothers(path: Path) -> bool:
    from planner.trainers.comments import is_ours

    if not path.exists() and not path.is_symlink():
        return False
    if path.is_symlink() or not path.is_file():
        return True
    with path.open(encoding="utf-8", errors="replace") as file:
        return not is_ours(file.read(200))


def _replace(path: Path, text: str) -> None:
    if path.exists() and not path.is_file():  # a pipe, a terminal: there is nothing to keep
        path.write_text(text, encoding="utf-8")
    else:  # with --force a link stays, and what it names is replaced
        write_whole(path.resolve(), text)


def _unwritable(path: Path, error: OSError) -> PlannerError:
    return unwritable(path, error, "choose another --output")


def _say(emitted: Emitted, written: list[Path] | None) -> None:
    from planner.trainers.comments import one_line

    for warning in emitted.warnings:
        tell(f"Warning: {warning}")
    if written is not None:
        tell(f"Wrote {' and '.join(map(str, written))}.")
    elif emitted.beside:
        names = " and ".join(emitted.beside)
        tell(f"Not shown: {names}, which it needs; --output DIR writes all.")
    tell(f"Run: {one_line(emitted.launch, 4000)}")
