"""`planner report`: one page to look at, of predicted steps and of searches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from planner.cli.arguments import (
    GRID_FIELDS,
    SEVERAL_OPTIONS,
    given_fields,
    model_and_settings,
    refuse_empty,
    with_model_options,
    with_several_options,
)
from planner.cli.command import Command
from planner.cli.output import say
from planner.cli.several import link_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from planner.hardware import Gpu
    from planner.report.pages.step import Step
    from search.report.lead import Subject


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
@click.option("--title", metavar="TEXT", help="The page's title.")
@click.option("--study-name", metavar="NAME", help="Which study, where a storage holds several.")
@click.option("--gpu", metavar="NAME[,NAME…]", help="GPUs of 'planner gpus', for a MODEL.")
@click.option("--memory", metavar="SIZE", help="Memory to fit into: 24GiB, 24GB.")
@click.option(
    "--allocator", metavar="OPTIONS", help="In place of this environment's PYTORCH_ALLOC_CONF."
)
@with_model_options
@with_several_options
@click.option("--trace", "traced", is_flag=True, help="Trace the real module, even of a Swin.")
def command(targets: tuple[str, ...], **given: Any) -> None:  # fmt: skip
    """Draw RUNs and MODELs as one HTML page that opens offline.

    A RUN is the --output of a 'planner tune' or a 'planner data', ended or still running, a file of
    records, or the --storage of a study. A MODEL is estimated, with the options of 'planner
    estimate'; several values make several estimates. More than one of either are shown side by
    side.
    """
    refuse_empty({"target": targets, **given})
    from search.report.reading import is_run, read_run
    from search.report.writing import make_page, write_page

    subjects: list[Subject] = []
    for target in targets:
        subjects += (
            [read_run(target, given["study_name"])] if is_run(target) else _steps(target, given)
        )
    path = write_page(make_page(subjects, given["title"] or ""), given["output"])
    say(f"Wrote {path}.")


def _steps(model: str, given: dict[str, Any]) -> Iterator[Step]:
    """The estimates that the options mean: one for each GPU and each combination of values."""
    from planner.hardware import find_gpu

    names = (given["gpu"] or "").split(",") if given["gpu"] else [None]
    for name in names:
        yield from _steps_on(model, find_gpu(name.strip()) if name else None, given)


def _steps_on(model: str, gpu: Gpu | None, given: dict[str, Any]) -> Iterator[Step]:
    from planner.cli.estimate import read_allocator_option, record_traces
    from planner.estimation import default_precision, estimate_ledger, resolve
    from planner.hardware.precisions import check_precision
    from planner.ledgers import step_ledger
    from planner.report.pages.step import Step
    from planner.units import parse_bytes

    memory = parse_bytes(given["memory"]) if given["memory"] else None
    allocator = read_allocator_option(given["allocator"])
    chosen, settings = model_and_settings(model, given, {"precision": default_precision(gpu)})
    of_model, _ = given_fields(given, (*GRID_FIELDS, *SEVERAL_OPTIONS))
    for setting in settings:
        check_precision(gpu, setting.precision)
    link = link_of(given["link"], settings, gpu)
    rows = [resolve(chosen, setting) for setting in settings]
    record_traces(rows, {**given, "retrace": False})
    for config, setting in rows:
        ledger = step_ledger(config, setting, given["traced"])
        found = estimate_ledger(config, setting, ledger, gpu, memory, allocator, link=link)
        yield Step(found, ledger, gpu, allocator, link, memory, model, of_model)
