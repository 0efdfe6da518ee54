"""`planner validate`: predicted against measured on this device, or from records."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.cli.arguments import (
    model_and_settings,
    read_duration,
    refuse_empty,
    with_model_options,
)
from planner.cli.command import Command
from planner.cli.observations import print_list, print_observations
from planner.cli.output import print_json, print_table
from planner.cli.progress import quiet_flag, show_on
from planner.errors import PlannerError, UsageError
from planner.schema import FactoryModel, MeasurementRecord
from planner.schema.observation import ObservationRecord
from planner.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from search.study.records import RecordFile
    from search.validation.compare import Comparison
    from search.validation.matrix import Matrix, Row

WAY_OUT = "Ctrl-C ends; the same command goes on from there"
DEFAULT_GRID = {
    "batch_size": "8,32", "precision": "fp32,bf16", "checkpointing": "none,blocks",
}  # fmt: skip


@click.command(
    cls=Command,
    headings={
        "Rows": (
            "matrix", "record", "replay", "published", "held_out", "rehearse", "only_list",
            "budget", "fit",
        ),
    },
    examples=(
        "planner validate native:swin_tiny --device cpu --list",
        "planner validate --replay validation.jsonl",
    ),
)  # fmt: skip
@click.argument("models", nargs=-1, metavar="[MODEL]…")
@with_model_options
@click.option("--matrix", metavar="FILE", help="Rows to measure, as tests/truth/memory.yaml.")
@click.option(
    "--record",
    metavar="FILE",
    default="validation.jsonl",
    show_default=True,
    help="Append records here; rows that it holds are not measured again.",
)
@click.option(
    "--replay",
    multiple=True,
    metavar="FILE",
    help="Measure nothing: compare the records of FILE; may be repeated.",
)
@click.option(
    "--published",
    metavar="FILE",
    help="Measure nothing: compare what others published, as tests/truth/public.jsonl quotes it.",
)
@click.option(
    "--device", metavar="DEVICE", default="auto", show_default=True, help="auto, cpu, cuda:0 …"
)
@click.option(
    "--budget", metavar="TIME", help="Stop within this time: 90s, 10m (a matrix may set it)."
)
@click.option("--held-out", is_flag=True, help="Only the rows that judge the fit.")
@click.option("--fit", is_flag=True, help="Print what the records say of the device's constants.")
@click.option("--list", "only_list", is_flag=True, help="Print the rows and measure nothing.")
@click.option(
    "--rehearse",
    is_flag=True,
    help="Run the whole list with tiny models and short times, to see that all of it works here.",
)
@quiet_flag
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def command(models: tuple[str, ...], **given: Any) -> int:  # fmt: skip
    """Run a matrix of settings for real and print predicted against measured.

    With MODELs, every combination of the options' values (batch 8 and 32, fp32 and bf16, with and
    without checkpointing unless given); with --matrix, the rows of a file; with --replay, existing
    records. Run the same command again to continue where it stopped. A matrix may also name things
    to observe first, such as the text of an error: tests/truth/first.yaml is for the first minutes
    on a new device.
    """
    refuse_empty({"model": models, **given})
    from search import check_platform
    from search.study.mixture import describe_mixture
    from search.validation.compare import compare

    if given["published"]:
        from planner.cli.published import print_published

        _refuse_beside_published(models, given)
        print_published(given["published"], given["as_json"])
        return 0
    budget_seconds = _check(models, given)
    check_platform()
    if given["replay"]:
        found, status = _replayed(given["replay"]), 0
    else:
        found, status = _measured(models, given, budget_seconds)
    if given["only_list"] or status:
        return status
    records = found.records
    mixture = describe_mixture(records)
    if mixture:
        click.echo(f"{mixture} See what else differs: planner doctor --compare.", err=True)
    comparisons = compare(records)
    if given["held_out"]:
        comparisons = [c for c in comparisons if c.held_out]
    if given["fit"]:
        from search.validation.compare import fit_overheads

        print_json(fit_overheads(comparisons))
    elif given["as_json"]:
        print_json([_as_json(c) for c in comparisons])
    else:
        if found.observations:
            print_observations(found.observations)
        if records or not found.observations:
            _print_comparison(comparisons, records)
    return 0


def _refuse_beside_published(models: tuple[str, ...], given: dict[str, Any]) -> None:
    others = ["a MODEL"] * bool(models)
    others += [f"--{name}" for name in ("matrix", "replay", "fit") if given[name]]
    if others:
        raise UsageError(
            f"{others[0]} and --published were both given: published figures are only compared.",
            "Name one of them.",
        )


def _check(models: tuple[str, ...], given: dict[str, Any]) -> float | None:
    """Refuses what contradicts itself before anything is read; the budget in seconds."""
    if given["replay"] and (models or given["matrix"]):
        what = "a MODEL" if models else "a --matrix"
        raise UsageError(
            f"{what} and --replay were both given: a replay measures nothing.",
            "Name one of them.",
        )
    return None if given["budget"] is None else read_duration("--budget", given["budget"])


def _replayed(files: Sequence[str]) -> RecordFile:
    from search.study.records import RecordFile, read_records

    records: list[MeasurementRecord] = []
    observations: list[ObservationRecord] = []
    for file in files:
        if not Path(file).exists():
            raise UsageError(f"{file} does not exist.", "Name a file of records (JSON lines).")
        read = read_records(file)
        if read.fault and not read.records and not read.observations:
            raise PlannerError(f"{read.fault}: no record was read.")
        records += read.records
        observations += read.observations
        if read.fault:
            click.echo(f"{read.fault}; {len(read.records)} records before it were read.", err=True)
    return RecordFile(tuple(records), observations=tuple(observations))


def _measured(
    models: tuple[str, ...], given: dict[str, Any], budget_seconds: float | None
) -> tuple[RecordFile, int]:
    """The records of the list, once it was carried out, and the exit status of a signal or 0."""
    from planner.cli.watching import ListShown
    from search.interrupts import heard
    from search.probe.device import check_world, choose_device, describe_device, why_no_gpu
    from search.study.records import RecordFile, check_writable, read_records
    from search.validation.observe import remaining_observations
    from search.validation.run import remaining_rows
    from search.validation.survey import carry_out

    matrix = _matrix(models, given)
    file = Path(given["record"])
    known = read_records(file)
    device = choose_device(given["device"])
    name = describe_device(device).name
    to_see = remaining_observations(matrix.observations, known.observations, name)
    left = remaining_rows(matrix.rows, known.records, name)
    if given["only_list"]:
        print_list(matrix, [o.name for o in to_see], left, file)
        return RecordFile(()), 0
    check_writable(file, "--record")
    for row in matrix.rows:
        check_world(device, row.setting)
    status = 0
    with heard(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as interrupts:
        try:
            with show_on("planner validate", given["quiet"], WAY_OUT) as show:
                show.say(f"{_what(matrix, len(to_see), len(left))} on {device}; records in {file}.")
                if device == "cpu":
                    show.say(f"Measuring on the CPU ({why_no_gpu() or 'the CPU was asked for'}): "
                             "the estimate is of a CUDA device, so its figures are not held "
                             "against these.")  # fmt: skip
                budget_seconds = budget_seconds or matrix.budget_seconds
                shown = ListShown(show, budget_seconds)
                carry_out(matrix, device, file, shown.seen, shown.measured, budget_seconds,
                          given["rehearse"], shown.run)  # fmt: skip
        except KeyboardInterrupt:
            click.echo("Stopped. The same command goes on from here.", err=True)
            if interrupts.number != signal.SIGINT:  # whoever ended it reads no comparison
                status = interrupts.exit_status
    found = read_records(file)
    num_left = len(remaining_rows(matrix.rows, found.records, name))
    if not given["rehearse"]:
        num_left += len(remaining_observations(matrix.observations, found.observations, name))
    if num_left:
        click.echo(f"{num_left} of the list are left for the same command.", err=True)
    return found, status


def _what(matrix: Matrix, num_to_see: int, num_left: int) -> str:
    seen = f"{num_to_see} of {len(matrix.observations)} things to see and " if num_to_see else ""
    return f"{seen}{num_left} of {len(matrix.rows)} rows to measure"


def _matrix(models: tuple[str, ...], given: dict[str, Any]) -> Matrix:
    """What is to be done: the file's list or the command line's rows, made small to rehearse."""
    from search.validation.matrix import Matrix
    from search.validation.reading import read_matrix
    from search.validation.rehearsal import rehearse

    if given["matrix"] and models:
        raise UsageError("a MODEL and a --matrix were both given.", "Name one of them.")
    if given["matrix"]:
        matrix = read_matrix(Path(given["matrix"]))
    else:
        matrix = Matrix(tuple(_rows(models, given)))
    return rehearse(matrix) if given["rehearse"] else matrix


def _rows(models: tuple[str, ...], given: dict[str, Any]) -> list[Row]:
    from search.validation.matrix import Row

    if not models:
        raise UsageError(
            "no model to measure was named.",
            "Name a MODEL, --matrix FILE, --replay FILE or --published FILE.",
        )
    from planner.estimation import resolve
    from planner.libraries.factory import check_factory

    rows = []
    for text in models:
        model, settings = model_and_settings(text, given, DEFAULT_GRID)
        if isinstance(model, FactoryModel):
            check_factory(model.factory)
        for setting in settings:
            chosen = resolve(model, setting)
            rows.append(Row("command line", *chosen, repeat=0, measure_seconds=2.0))
    return rows


def _print_comparison(
    comparisons: Sequence[Comparison], records: Sequence[MeasurementRecord]
) -> None:
    from planner.report.settings import describe_setting
    from search.validation.compare import QUANTITIES, accuracy, rank_correlation

    if not comparisons:
        click.echo(f"None of {len(records)} records was measured on a GPU: nothing to compare.")
        return
    rows = [
        (
            c.record.model.title,
            describe_setting(c.record.setting),
            *(_pair(c, quantity) for quantity in QUANTITIES),
        )
        for c in comparisons
    ]
    print_table(rows, ("model", "setting", *QUANTITIES))
    click.echo("\nEach figure: measured, and how far the prediction is off.\n")
    summary = []
    for kind, chosen in (
        ("eager", [c for c in comparisons if c.record.setting.compile == "off"]),
        ("compiled", [c for c in comparisons if c.record.setting.compile != "off"]),
    ):
        for quantity in QUANTITIES:
            found = accuracy(chosen, quantity)
            if found is not None:
                summary.append(
                    (kind, quantity, found.count, f"{found.median:.1%}", f"{found.worst:.1%}")
                )
    print_table(summary, ("", "", "rows", "median error", "worst error"))
    correlation = rank_correlation(comparisons)
    if correlation is not None:
        click.echo(f"\nRank correlation of predicted and measured step time: {correlation:.3f}")
    _print_phases(comparisons)
    _print_ranks(comparisons)


def _print_ranks(comparisons: Sequence[Comparison]) -> None:
    """What each rank of a probe over several measured, against the estimate of the worst one."""
    from planner.report.settings import describe_setting
    from search.validation.compare import QUANTITIES

    rows = [
        (
            describe_setting(c.record.setting),
            rank,
            *(_figure(quantity, figures.get(quantity)) for quantity in QUANTITIES),
        )
        for c in comparisons
        for rank, figures in c.ranks.items()
    ]
    if rows:
        click.echo("\nEach rank: measured, and how far the prediction for the worst rank is off.\n")
        print_table(rows, ("setting", "rank", *QUANTITIES))


def _print_phases(comparisons: Sequence[Comparison]) -> None:
    from statistics import median

    from search.validation.compare import PHASES

    rows = []
    for phase in PHASES:
        errors = [abs(p / m - 1) for c in comparisons if phase in c.phases
                  for p, m in [c.phases[phase]] if m]  # fmt: skip
        if errors:
            rows.append((phase.replace("_", " "), len(errors), f"{median(errors):.2%}",
                         f"{max(errors):.2%}"))  # fmt: skip
    if rows:
        click.echo("")
        print_table(rows, ("live bytes", "rows", "median error", "worst error"))


def _pair(comparison: Comparison, quantity: str) -> str | None:
    return _figure(quantity, comparison.figures.get(quantity))


def _figure(quantity: str, pair: tuple[float, float] | None) -> str | None:
    """What was measured, and how far the prediction is off."""
    if pair is None:
        return None
    predicted, measured = pair
    text = format_seconds(measured) if quantity == "step time" else format_bytes(int(measured))
    return f"{text} {predicted / measured - 1:+.1%}"


def _as_json(comparison: Comparison) -> dict[str, Any]:
    return {
        "model": comparison.record.model.model_dump(mode="json"),
        "setting": comparison.record.setting.model_dump(mode="json"),
        "device": json.loads(comparison.record.device.model_dump_json()),
        "held_out": comparison.held_out,
        "figures": {
            quantity: {"predicted": predicted, "measured": measured}
            for quantity, (predicted, measured) in comparison.figures.items()
        },
        "phases": {
            phase: {"predicted": predicted, "measured": measured}
            for phase, (predicted, measured) in comparison.phases.items()
        },
        "ranks": {
            rank: {
                quantity: {"predicted": predicted, "measured": measured}
                for quantity, (predicted, measured) in figures.items()
            }
            for rank, figures in comparison.ranks.items()
        },
    }
