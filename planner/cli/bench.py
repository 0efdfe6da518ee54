"""`planner bench attention`: window attention by itself, timed on this device."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.cli.arguments import read_duration, refuse_empty
from planner.cli.command import HELP_SETTINGS, Command
from planner.cli.output import print_json, say
from planner.errors import PlannerError, UsageError, alternatives, unknown_name
from planner.schema import SwinConfig
from planner.schema.bench import PATHS, PRECISIONS, BenchRecord
from planner.schema.model import MAX_SIZE

if TYPE_CHECKING:
    from planner.benches.cases import Cases, Shape, Wanted
    from planner.benches.running import Limits

SHAPES, SHIFTS, SWINS = ("guide", "stages"), ("plain", "shifted"), ("1", "2")
# Images of a model's stages where nobody says: enough to fill a GPU, and a CPU answers in seconds.
_IMAGES = {"cuda": 64, "cpu": 2}


@click.group(context_settings=HELP_SETTINGS)
def command() -> None:
    """Time parts of a model on this device."""


@command.command(
    cls=Command,
    short_help="Window attention, forward and backward.",
    headings={
        "What is timed": (
            "library", "path", "precision", "swin", "windows", "shapes", "batch_size", "only_list",
        ),
        "Limits": ("budget", "deadline", "measure"),
        "Output": ("output", "compare", "as_json"),
    },
    examples=(
        "planner bench attention native:swin_tiny --list",
        "planner bench attention --library native --budget 5m",
    ),
)  # fmt: skip
@click.argument("model", required=False)
@click.option("--library", metavar="L[,L…]", help="Only these (all that are installed).")
@click.option("--path", metavar="P[,P…]", help=f"Only these: {', '.join(PATHS)}.")
@click.option("--precision", metavar="P[,P…]", help=f"{alternatives(PRECISIONS)} (fp32).")
@click.option("--swin", metavar="V[,V…]", help="Versions of Swin at the guide's shape: 1,2.")
@click.option("--windows", metavar="W[,W…]", help="Only these: plain, shifted.")
@click.option("--shapes", metavar="S[,S…]", help="Only these: guide, stages (of MODEL).")
@click.option("--batch-size", type=click.IntRange(1, MAX_SIZE), metavar="N",
              help="Images at MODEL's stages (64 on a GPU, 2 on the CPU).")  # fmt: skip
@click.option(
    "--device", metavar="DEVICE", default="auto", show_default=True, help="auto, cpu, cuda:0 …"
)
@click.option("--budget", metavar="TIME", help="Stop within this time: 90s, 10m.")
@click.option(
    "--deadline", metavar="TIME", help="Give a case up after this time (90s; compiled 7m)."
)
@click.option("--measure", metavar="TIME", help="Time a case for so long at most (3s).")
@click.option("--output", metavar="FILE", default="bench.jsonl", show_default=True,
              help="Append the records here, one JSON line each.")  # fmt: skip
@click.option("--compare", nargs=2, metavar="A B", help="Measure nothing: compare two such files.")
@click.option("--list", "only_list", is_flag=True, help="Print the cases and measure nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
def attention(model: str | None, **given: Any) -> int:
    """Time window attention, forward and backward, as every installed library computes it.

    At the shape [2, 56, 56, 96] with windows of 7 and 3 heads, and at each stage of MODEL: written
    out (eager), by one fused call (sdpa), and both compiled. Each result is held against float64
    first. Exit status 1 where nothing could be timed.
    """
    refuse_empty({"model": model, **given})
    if given["compare"]:
        if model is not None:
            raise UsageError("--compare measures nothing, and so needs no MODEL.", "Omit it.")
        first, second = given["compare"]
        _compare(first, second, given["as_json"])
        return 0
    cases = _cases(model, given)
    if given["only_list"]:
        _print_list(cases)
        return 0
    from search.interrupts import heard

    with heard(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as interrupts:
        records = _measured(cases, given)
        if given["as_json"]:
            print_json([_as_json(record) for record in records])
        elif records:
            from planner.report.bench import bench_text

            say(bench_text(records))
        if interrupts.number is not None:
            return interrupts.exit_status
    return 0 if any(record.both is not None for record in records) else 1


def _cases(model: str | None, given: dict[str, Any]) -> Cases:
    from planner.benches.cases import Wanted, all_cases, installed_libraries, is_installed
    from planner.libraries.registry import SPECS
    from search import check_platform
    from search.probe.device import choose_device

    check_platform()
    libraries = _choice(given, "library", tuple(SPECS)) if given["library"] else None
    for library in libraries or ():
        if not is_installed(library):
            raise PlannerError(f"{library} is not installed.", "Omit it from --library.")
    device = choose_device(given["device"])
    wanted: Wanted = Wanted(
        libraries=libraries or installed_libraries(),  # type: ignore[arg-type]
        shapes=_shapes(model, given, device),
        versions=tuple(int(version) for version in _choice(given, "swin", SWINS)),
        paths=_choice(given, "path", PATHS),  # type: ignore[arg-type]
        shifts=tuple(word == "shifted" for word in _choice(given, "windows", SHIFTS)),
        precisions=(
            _choice(given, "precision", PRECISIONS) if given["precision"] else ("fp32",)  # type: ignore[arg-type]
        ),
    )
    found = all_cases(wanted)
    for line in found.left_out:
        click.echo(line, err=True)
    if not found.cases:
        raise UsageError(
            "no case is left of what was asked for.",
            "Name other libraries, paths, versions or windows, or omit these options.",
        )
    return found


def _choice(given: dict[str, Any], option: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The values of an option, each known; all where it is not given."""
    if given[option] is None:
        return known
    words = tuple(word.strip() for word in given[option].split(",") if word.strip())
    for word in words:
        if word not in known:
            raise unknown_name(f"--{option}", word, known, f"Choose {alternatives(known)}.")
    return tuple(dict.fromkeys(words))


def _shapes(model: str | None, given: dict[str, Any], device: str) -> tuple[Shape, ...]:
    from planner.benches.cases import GUIDE_SHAPE, stages_of
    from planner.libraries.resolve import resolve_model

    words = _choice(given, "shapes", SHAPES)
    if model is None and given["shapes"] and "stages" in words:
        raise UsageError("--shapes stages needs a MODEL.", "Name one, as native:swin_tiny.")
    if model is not None and "stages" not in words:
        raise UsageError(f"--shapes guide leaves nothing of {model}.", "Omit one of the two.")
    if model is None and given["batch_size"]:
        raise UsageError(
            "--batch-size is of a MODEL's stages, and none is named.", "Name one, or omit it."
        )
    shapes = [GUIDE_SHAPE] if "guide" in words else []
    if model is not None and "stages" in words:
        config = resolve_model(model)
        if not isinstance(config, SwinConfig):
            raise UsageError(
                f"{model} is no Swin of 'planner models', and only theirs have window attention.",
                "Name one, as native:swin_tiny.",
            )
        images = given["batch_size"] or _IMAGES[device.partition(":")[0]]
        shapes += stages_of(config, images)
    return tuple(shapes)


def _measured(cases: Cases, given: dict[str, Any]) -> list[BenchRecord]:
    """Times all cases; each record is on disk before the next case begins."""
    from planner.benches.records import append_record
    from planner.benches.running import run_cases
    from planner.report.bench import describe_shape, outcome_line
    from search.probe.device import choose_device, describe_device
    from search.study.records import check_writable
    from search.surrogate.device_rates import device_rates

    file = Path(given["output"])
    check_writable(file)
    device = choose_device(given["device"])
    limits = _limits(given)
    rates = device_rates(device, describe_device(device), limits.budget_seconds, _tell)
    _tell(f"{len(cases.cases)} cases to time on {device}; records in {file}.")
    records: list[BenchRecord] = []

    def keep(record: BenchRecord) -> None:
        before = describe_shape(records[-1].case) if records else ""
        records.append(record)  # first: a signal may come at any moment
        append_record(file, record)
        if describe_shape(record.case) != before:
            _tell(describe_shape(record.case))
        _tell(f"{len(records)}/{len(cases.cases)} {outcome_line(record)}")

    try:
        left = run_cases(cases.cases, device, limits, keep, rates)
    except KeyboardInterrupt:
        _tell("Stopped.")
        left = []
    if left:
        _tell(f"The budget of {given['budget']} left no time for {len(left)} cases.")
    return records


def _limits(given: dict[str, Any]) -> Limits:
    from planner.benches.running import Limits

    seconds = {
        field: read_duration(f"--{option}", given[option])
        for option, field in (
            ("budget", "budget_seconds"), ("deadline", "deadline_seconds"),
            ("measure", "measure_seconds"),
        )
        if given[option] is not None
    }  # fmt: skip
    return Limits(**seconds)


def _compare(first: str, second: str, as_json: bool) -> None:
    from planner.benches.records import compare, read_records
    from planner.report.bench import comparison_text

    found = compare(read_records(Path(first)), read_records(Path(second)))
    if not as_json:
        say(comparison_text(found))
        return
    print_json(
        {
            "changed": found.changed,
            "cases": [
                {
                    "case": one.first.case.model_dump(mode="json"),
                    "ratio": one.ratio,
                    "is_real": one.is_real,
                    "verdict": one.verdict,
                }
                for one in found.differences
            ],
            "not_compared": [case.model_dump(mode="json") for case in found.not_compared],
        }
    )


def _print_list(cases: Cases) -> None:
    from planner.report.bench import describe_case, describe_shape

    for case in cases.cases:
        say(f"{describe_shape(case)}: {describe_case(case)}")
    say(f"{len(cases.cases)} cases.")


def _as_json(record: BenchRecord) -> dict[str, Any]:
    return {
        **record.model_dump(mode="json"),
        "flops_per_second": record.flops_per_second,
        "flop_share": record.flop_share,
        "bandwidth": record.bandwidth,
        "bandwidth_share": record.bandwidth_share,
    }


def _tell(text: str) -> None:
    click.echo(text, err=True)
