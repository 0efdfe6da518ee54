"""`planner emit`: a result as the files of a trainer."""

import os
from pathlib import Path

import click

from planner.cli.options import Request, argument, option, reads, refuse_if, split_fields, switch
from planner.cli.rows import read_piped
from planner.cli.show import tell
from planner.core.errors import PlannerError
from planner.core.files import unwritable, write_whole
from planner.core.schema.model import MAX_SIZE
from planner.trainers.registry import TARGETS, find_trainer

OTHER_OUTPUT = "choose another --output"


class EmitRequest(Request):
    """The request of `planner emit`."""

    result: str = argument("RESULT", "file")
    trainer: str | None = option(f"Required: one of {', '.join(TARGETS)}.", "TRAINER",
                                 flag="--for", values="trainers")  # fmt: skip
    way: int | None = option("Which way of the advice, or which of several estimates.",
                             shown="the recommended", bounds=(1, MAX_SIZE))  # fmt: skip
    output: str | None = option("Write here (a file or a directory).", "PATH", values="file")
    force: bool = switch("Also replace files that 'planner emit' did not write.")
    changes: tuple[str, ...] = option(
        "Change a field of the setting; the result is then not measured.", "FIELD=VALUE",
        default=(), flag="--set", values="assigned",
    )  # fmt: skip


@reads(EmitRequest)
def command(request: EmitRequest) -> None:
    """Write RESULT for a trainer: the directory of a `planner tune` (or its recommendation.json),
    or what `planner advise` or `planner estimate` printed with --json (- is standard input).

    Where the setting was only predicted, the file and standard error say so. The file goes to
    standard output or to --output (with a second one where the trainer needs Python code beside
    it), warnings to standard error. An earlier output is replaced, any other file only with
    --force.

    Examples:
      planner emit run --for timm --output args.yaml
      planner emit run --for pytorch --output train.py
      planner emit advice.json --way 2 --for transformers
    """
    from planner.trainers.emission import emit
    from planner.trainers.plan import one_line

    trainer = request.trainer or ""
    refuse_if(not trainer, "No trainer is named.", f"Add --for with one of {', '.join(TARGETS)}.")
    result, changes = read_piped(request.result), split_fields(request.changes)
    law = f"--set {', '.join(changes.model)} would make another model than RESULT's."
    refuse_if(changes.model, law, "Change fields of the setting only, or tune that model.")
    file = None if request.output is None else Path(request.output)
    try:
        if file and (file.is_dir() or not (file.suffix or file.exists())):
            file /= find_trainer(trainer).filename
    except OSError as error:
        raise unwritable(str(file), error, OTHER_OUTPUT) from None
    emitted = emit(result, trainer, way=request.way, changes=changes.setting, output=file)
    note = f"Not shown: {' and '.join(emitted.modules)}, which it needs; --output DIR writes all."
    if file is None:
        click.echo(emitted.text, nl=False)
    else:
        modules = {file.parent / name: text for name, text in emitted.modules.items()}
        law = f"{trainer} needs {len(modules) + 1} files, and {file} is one of the others."
        refuse_if(file in modules, law, f"For example --output {file.parent / emitted.filename}.")
        _write_files({file: emitted.text, **modules}, request.force)
        note = f"Wrote {' and '.join(map(str, (file, *modules)))}."
    for warning in emitted.warnings:
        tell(f"Warning: {warning}")
    if file or emitted.modules:
        tell(note)
    tell(f"Run: {one_line(emitted.launch, 4000)}")


def _write_files(contents: dict[Path, str], force: bool) -> None:
    """Write all files, or none if one of them may not be replaced.

    Raises PlannerError for a file that exists and no `planner emit` wrote, or that cannot be
    written.
    """
    from planner.trainers.plan import is_ours

    path = Path()
    try:
        for path in contents:
            is_file = not force and path.is_file() and not path.is_symlink()
            head = path.open(encoding="utf-8", errors="replace").read(200) if is_file else ""
            if not force and os.path.lexists(path) and not (is_file and is_ours(head)):
                raise PlannerError(
                    f"{path} exists, and 'planner emit' did not write it.",
                    "Choose another --output, or replace it with --force.",
                )
            path.parent.mkdir(parents=True, exist_ok=True)
        for path, text in contents.items():
            if path.exists() and not path.is_file():  # a pipe or a terminal: nothing to protect
                path.write_text(text, encoding="utf-8")
            else:  # with --force a link stays, and the file that it names is replaced
                write_whole(path.resolve(), text)
    except OSError as error:
        raise unwritable(path, error, OTHER_OUTPUT) from None
