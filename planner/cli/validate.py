"""`planner validate`: predicted against measured on this device, or from records."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
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
from planner.cli.output import print_json, print_table, say, tell
from planner.cli.progress import quiet_flag, show_on
from planner.core.errors import PlannerError, UsageError, printable
from planner.core.schema import FactoryModel, MeasurementRecord
from planner.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from search.tuning.validation.compare import Comparison
    from search.tuning.validation.matrix import Row

WAY_OUT = "Ctrl-C ends; the same command goes on from there"
DEFAULT_GRID = {
    "batch_size": "8,32", "precision": "fp32,bf16", "checkpointing": "none,blocks",
}  # fmt: skip


@click.command(
    cls=Command,
    headings={
        "Rows": (
            "matrix", "record", "replay", "only_list", "budget",
        ),
    },
    examples=(
        "planner validate native:swin_tiny --device cpu --list",
        "planner validate --replay validation.jsonl",
    ),
)  # fmt: skip
@click.argument("models", nargs=-1, metavar="[MODEL]…")
@with_model_options
@click.option("--matrix", metavar="FILE", help="Rows to measure: see tests/truth/memory.yaml.")
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
    "--device", metavar="DEVICE", default="auto", show_default=True, help="auto, cpu, cuda:0 …"
)
@click.option("--budget", metavar="TIME", help="Stop within this time: 90s, 10m.")
@click.option("--list", "only_list", is_flag=True, help="Print the rows and measure nothing.")
@quiet_flag
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def command(models: tuple[str, ...], **given: Any) -> int:  # fmt: skip
    """Run a matrix of settings for real and print predicted against measured.

    With MODELs, every combination of the options' values (batch 8 and 32, fp32 and bf16, with and
    without checkpointing unless given); with --matrix, the rows of a file; with --replay, existing
    records. Run the same command again to continue where it stopped.
    """
    refuse_empty({"model": models, **given})
    from search import check_platform
    from search.loop.study.mixture import describe_mixture
    from search.tuning.validation.compare import compare, trace_compiled

    budget_seconds = _check(models, given)
    check_platform()
    if given["replay"]:
        records, status = _replayed(given["replay"]), 0
    else:
        records, status = _measured(models, given, budget_seconds)
    if given["only_list"] or status not in (0, 128 + signal.SIGINT):  # nobody reads a comparison
        return status
    mixture = describe_mixture(records)
    if mixture:
        tell(f"{mixture} See what else differs: planner doctor --compare.")
    trace_compiled(records)
    comparisons = compare(records)
    if given["as_json"]:
        print_json([_as_json(c) for c in comparisons])
    else:
        _print_comparison(comparisons, records)
    return status


def _check(models: tuple[str, ...], given: dict[str, Any]) -> float | None:
    """Refuses what contradicts itself before anything is read; the budget in seconds."""
    if given["replay"] and (models or given["matrix"]):
        what = "a MODEL" if models else "a --matrix"
        raise UsageError(
            f"{what} and --replay were both given: a replay measures nothing.",
            "Name one of them.",
        )
    return None if given["budget"] is None else read_duration("--budget", given["budget"])


def _replayed(files: Sequence[str]) -> Sequence[MeasurementRecord]:
    from search.loop.study.records import read_records

    records: list[MeasurementRecord] = []
    for file in files:
        if not Path(file).exists():
            raise UsageError(f"{file} does not exist.", "Name a file of records (JSON lines).")
        read = read_records(file)
        if read.fault and not read.records:
            raise PlannerError(f"{read.fault}: no record was read.")
        records += read.records
        if read.fault:
            tell(f"{read.fault}; {len(read.records)} records before it were read.")
    return records


def _measured(
    models: tuple[str, ...], given: dict[str, Any], budget_seconds: float | None
) -> tuple[Sequence[MeasurementRecord], int]:
    """The records of the list, once it was carried out, and the exit status of a signal or 0."""
    from planner.cli.watching import ListShown, describe_row
    from search.loop.interrupts import handle_signals
    from search.loop.study.records import check_writable, read_records
    from search.probe.device import check_world, choose_device, describe_device, why_no_gpu
    from search.tuning.validation.run import measure, remaining_rows

    rows = _rows(models, given)
    file = Path(given["record"])
    device = choose_device(given["device"])
    name = describe_device(device).title
    left = remaining_rows(rows, read_records(file).records, name)
    if given["only_list"]:
        for row in rows:
            click.echo(printable(f"{'  ' if row in left else 'ok'} {describe_row(row)}"))
        say(f"{len(rows)} rows, {len(rows) - len(left)} of them in {file}.")
        return (), 0
    check_writable(file, "--record")
    for row in rows:
        check_world(device, row.setting)
    status = 0
    with handle_signals(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as interrupts:
        try:
            with show_on("planner validate", given["quiet"], WAY_OUT) as show:
                show.say(f"{len(left)} of {len(rows)} rows to measure on {device}; "
                         f"records in {file}.")  # fmt: skip
                if device == "cpu":
                    show.say(f"Measuring on the CPU ({why_no_gpu() or 'the CPU was asked for'}): "
                             "the estimate is of a CUDA device, so its figures are not held "
                             "against these.")  # fmt: skip
                shown = ListShown(show, budget_seconds)
                measure(rows, device, file, shown.measured, budget_seconds, shown.run)
        except KeyboardInterrupt:
            click.echo("Stopped. The same command goes on from here.", err=True)
            status = interrupts.exit_status
    records = read_records(file).records
    if num_left := len(remaining_rows(rows, records, name)):
        click.echo(f"{num_left} of the list are left for the same command.", err=True)
    return records, status


def _rows(models: tuple[str, ...], given: dict[str, Any]) -> Sequence[Row]:
    """The file's rows or the command line's."""
    from search.tuning.validation.matrix import Row, read_matrix

    if given["matrix"] and models:
        raise UsageError("a MODEL and a --matrix were both given.", "Name one of them.")
    if given["matrix"]:
        return read_matrix(Path(given["matrix"]))
    if not models:
        raise UsageError(
            "no model to measure was named.",
            "Name a MODEL, --matrix FILE or --replay FILE.",
        )
    from planner.estimation.estimate import resolve
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
    from search.tuning.validation.compare import QUANTITIES, accuracies, rank_correlation

    if not comparisons:
        click.echo(f"None of {len(records)} records was measured on a GPU: nothing to compare.")
        return
    rows = [
        (
            c.record.model.title,
            describe_setting(c.record.setting, c.record.model),
            *(_figure(quantity, c.figures.get(quantity)) for quantity in QUANTITIES),
        )
        for c in comparisons
    ]
    print_table(rows, ("model", "setting", *QUANTITIES))
    click.echo("\nEach figure: measured, and how far the prediction is off.\n")
    summary = [
        (kind, quantity, of.count, f"{of.median:.1%}", f"{of.worst:.1%}")
        for kind, quantity, of in accuracies(comparisons)
    ]
    print_table(summary, ("", "", "rows", "median error", "worst error"))
    correlation = rank_correlation(comparisons)
    if correlation is not None:
        click.echo(f"\nRank correlation of predicted and measured step time: {correlation:.3f}")
    _print_phases(comparisons)
    _print_ranks(comparisons)


def _print_ranks(comparisons: Sequence[Comparison]) -> None:
    """What each rank of a probe over several measured, against the estimate of the worst one."""
    from planner.report.settings import describe_setting
    from search.tuning.validation.compare import QUANTITIES

    rows = [
        (
            describe_setting(c.record.setting, c.record.model),
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
    from search.tuning.validation.compare import phase_accuracies

    rows = [
        (phase, of.count, f"{of.median:.2%}", f"{of.worst:.2%}")
        for phase, of in phase_accuracies(comparisons)
    ]
    if rows:
        click.echo("")
        print_table(rows, ("live bytes", "rows", "median error", "worst error"))


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
        "figures": _pairs(comparison.figures),
        "phases": _pairs(comparison.phases),
        "ranks": {rank: _pairs(figures) for rank, figures in comparison.ranks.items()},
    }


def _pairs(found: Mapping[str, tuple[float, float]]) -> dict[str, dict[str, float]]:
    return {
        name: {"predicted": predicted, "measured": measured}
        for name, (predicted, measured) in found.items()
    }
