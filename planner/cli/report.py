"""`planner report`: one page to look at, of predicted steps and of searches."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from planner.cli.arguments import (
    GRID_FIELDS,
    SEVERAL_OPTIONS,
    given_fields,
    model_and_settings,
    read_gpus_option,
    refuse_empty,
    with_model_options,
    with_several_options,
)
from planner.cli.command import Command
from planner.cli.output import say
from planner.cli.several import link_of
from planner.core.errors import UsageError
from planner.core.schema import Model, ResolvedSetting
from planner.core.units import parse_bytes
from planner.estimation.estimate import default_precision, resolve
from planner.machine.hardware.precisions import check_precision

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from planner.machine.hardware import Gpu
    from planner.report.pages import Subject
    from planner.report.step import Step


@click.command(
    cls=Command,
    examples=(
        "planner report run",
        'planner report native:swin_tiny --batch-size 64 --gpu "RTX 3090,RTX 4090"',
    ),
)
@click.argument("targets", metavar="RUN|MODEL…", nargs=-1, required=True)
@click.option(
    "--output",
    metavar="FILE",
    default="report.html",
    show_default=True,
    help="The page, one .html file.",
)
@click.option("--force", is_flag=True, help="Also replace what 'planner report' did not write.")
@click.option("--title", metavar="TEXT", help="The page's title.")
@click.option("--study-name", metavar="NAME", help="Which study, where a storage holds several.")
@click.option(
    "--gpu", metavar="NAME[,NAME…]", help="GPUs of 'planner gpus', or all of them, ranked: all."
)
@click.option("--memory", metavar="SIZE", help="Memory to fit into: 24GiB, 24GB.")
@click.option("--allocator", metavar="OPTIONS", help="Used in place of PYTORCH_ALLOC_CONF.")
@with_model_options
@with_several_options
@click.option("--trace", "traced", is_flag=True, help="Trace the real module, also for a Swin.")
def command(targets: tuple[str, ...], **given: Any) -> None:  # fmt: skip
    """Draw RUNs and MODELs as one HTML page that opens offline.

    A RUN is the --output of 'planner tune' (also while it runs), a file of
    records, or the --storage of a study. A MODEL is estimated with the options of 'planner
    estimate': several values make several estimates, and --gpu all ranks every GPU. Two runs or
    estimates, or more, are shown side by side.
    """
    refuse_empty({"target": targets, **given})
    from planner.report.pages import make_page
    from search.runs import writing
    from search.runs.reading import is_run, read_run

    output = writing.check_page(given["output"], given["force"])
    for target in targets:
        writing.check_target(target)
    writing.check_options(_typed(given), targets)
    subjects: list[Subject] = []
    for target in targets:
        found = [read_run(target, given["study_name"])] if is_run(target) else _steps(target, given)
        subjects = writing.check_subjects([*subjects, *found])
    path = writing.write_page(make_page(subjects, given["title"] or ""), output, given["force"])
    say(f"Wrote {path}.")


def _typed(given: dict[str, Any]) -> dict[str, object]:
    """The options that a MODEL or a study takes, as they are typed, with what was given."""
    names = {"fields": "--set", "traced": "--trace"}
    of_page = ("output", "title", "force")
    return {
        names.get(option, f"--{option.replace('_', '-')}"): value
        for option, value in given.items()
        if option not in of_page
    }


def _steps(model: str, given: dict[str, Any]) -> Iterator[Step]:
    """The estimates that the options mean: one for each GPU and each combination of values."""
    gpus = read_gpus_option(given["gpu"])
    if given["gpu"] and given["gpu"].casefold() == "all":
        yield from _ranked(model, gpus, given)
        return
    for gpu in gpus or (None,):
        yield from _steps_on(model, gpu, given)


def _ranked(model: str, gpus: Sequence[Gpu], given: dict[str, Any]) -> list[Step]:
    """Every GPU of the catalogue that has the precision, the fastest that fits first."""
    from planner.cli.estimate import images_per_second, on_gpus

    refused = [
        o for o in ("--memory", "--gpus", "--nodes", "--parallelism", "--link") if given[o[2:]]
    ]
    if refused:
        raise UsageError(
            f"--gpu all does not go with {', '.join(refused)}: each GPU is judged by "
            "itself, with its own memory.",
            "Name the GPUs, or omit the option.",
        )
    chosen, settings = model_and_settings(model, given)
    rows, without = on_gpus([resolve(chosen, setting) for setting in settings], gpus)
    for said in without:
        click.echo(said, err=True)
    steps = _estimated(model, rows, given)
    return sorted(steps, key=lambda s: (not s.estimate.fits, -images_per_second(s.estimate)))


def _steps_on(model: str, gpu: Gpu | None, given: dict[str, Any]) -> list[Step]:
    chosen, settings = model_and_settings(model, given, {"precision": default_precision(gpu)})
    for setting in settings:
        check_precision(gpu, setting.precision)
    link = link_of(given["link"], settings, gpu)
    rows = [(gpu, *resolve(chosen, setting)) for setting in settings]
    return _estimated(model, rows, given, link)


def _estimated(
    model: str,
    rows: Sequence[tuple[Gpu | None, Model, ResolvedSetting]],
    given: dict[str, Any],
    link: str | None = None,
) -> list[Step]:
    """Each row as a step of the page; traces are made all at once."""
    from planner.cli.estimate import read_allocator_option, record_traces
    from search.runs.writing import step_of

    memory = parse_bytes(given["memory"]) if given["memory"] else None
    allocator = read_allocator_option(given["allocator"])
    record_traces(list(dict.fromkeys(row[1:] for row in rows)), {**given, "retrace": False})
    steps = [
        step_of(config, setting, gpu, memory, allocator, link, given["traced"])
        for gpu, config, setting in rows
    ]
    return [replace(step, said=model, fields=_of_model(given)) for step in steps]


def _of_model(given: dict[str, Any]) -> dict[str, str]:
    """What was typed of the model's own fields."""
    return given_fields(given, (*GRID_FIELDS, *SEVERAL_OPTIONS))[0]
