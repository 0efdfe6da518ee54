"""`planner bench attention`: window attention by itself, timed on this device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import click

from planner.cli.arguments import read_duration, refuse_empty
from planner.cli.command import HELP_SETTINGS, Command
from planner.cli.output import say
from planner.core.errors import PlannerError, UsageError
from planner.core.files import check_output
from planner.core.schema import SwinConfig
from planner.core.schema.model import LIBRARIES, MAX_SIZE
from search.tuning.benches.cases import (
    PATHS,
    Case,
    cases_of,
    installed_libraries,
    is_installed,
    shapes_of,
)

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
# Images where nobody says: the guide's 2; of a model's stages enough to fill a GPU, and a CPU
# answers in seconds.
_GUIDE_IMAGES, _IMAGES = 2, {"cuda": 64, "cpu": 2}


@click.group(context_settings=HELP_SETTINGS, no_args_is_help=False)
def command() -> None:
    """Time parts of a model on this device."""


@command.command(
    cls=Command,
    short_help="Window attention, forward and backward.",
    examples=(
        "planner bench attention native:swin_tiny --list",
        "planner bench attention --library native --path eager --path sdpa",
    ),
)
@click.argument("model", required=False)
@click.option("--library", multiple=True, type=click.Choice(LIBRARIES),
              help="Only this library; may be repeated (default: all installed).")  # fmt: skip
@click.option("--path", multiple=True, type=click.Choice(PATHS),
              help="Only this path; may be repeated.")  # fmt: skip
@click.option("--precision", multiple=True, type=click.Choice(PRECISIONS), default=("fp32",),
              show_default="fp32", help="May be repeated.")  # fmt: skip
@click.option("--batch-size", type=click.IntRange(1, MAX_SIZE), metavar="N",
              help="Images (default: 2; with MODEL on a GPU 64).")  # fmt: skip
@click.option(
    "--device", metavar="DEVICE", default="auto", show_default=True, help="auto, cpu, cuda:0 …"
)
@click.option("--measure", metavar="TIME", default="1s", show_default=True,
              help="Time each pass for at least this long.")  # fmt: skip
@click.option("--output", metavar="FILE.pt",
              help="Keep the measurements here, for --compare.")  # fmt: skip
@click.option("--compare", nargs=2, metavar="A B", help="Measure nothing: compare two such files.")
@click.option("--list", "only_list", is_flag=True, help="Print the cases and measure nothing.")
def attention(model: str | None, **given: Any) -> int:
    """Time window attention, forward and backward, as every installed library computes it.

    At the shape [2, 56, 56, 96] with windows of 7 and 3 heads, or at each stage of MODEL: written
    out (eager), by one fused call (sdpa), and both compiled, by torch.utils.benchmark. Each result
    is first compared with float64. Exit status 1 where nothing could be timed.
    """
    refuse_empty({"model": model, **given})
    if given["compare"]:
        if model is not None:
            raise UsageError("--compare measures nothing, and so needs no MODEL.", "Omit it.")
        return _compare(*map(Path, given["compare"]))
    seconds = read_duration("--measure", given["measure"])
    if given["output"]:
        check_output(given["output"], "a benchmark", (".pt",))
    from search import check_platform
    from search.probe.device import choose_device

    check_platform()
    device = choose_device(given["device"])
    cases = list(_cases(model, given, device))
    if not cases:
        raise UsageError("no case is left of what was asked for.", "Name other libraries or paths.")
    if given["only_list"]:
        for case in cases:
            say(f"{case.table}: {case.row}, {case.path}")
        say(f"{len(cases)} cases.")
        return 0
    return _measure(cases, device, seconds, given["output"])


def _cases(model: str | None, given: dict[str, Any], device: str) -> Iterator[Case]:
    from planner.libraries.resolve import resolve_model

    for library in given["library"]:
        if not is_installed(library):
            raise PlannerError(f"{library} is not installed.", "Omit it from --library.")
    config = None if model is None else resolve_model(model)
    if config is not None and not isinstance(config, SwinConfig):
        raise UsageError(
            f"{model} is no Swin of 'planner models', and only theirs have window attention.",
            "Name one, as native:swin_tiny.",
        )
    usual = _GUIDE_IMAGES if config is None else _IMAGES[device.partition(":")[0]]
    images = given["batch_size"] or usual
    for library in given["library"] or installed_libraries():
        for name, shape in shapes_of(config, library):
            try:
                yield from cases_of(name, shape, images, given["path"] or PATHS, given["precision"])
            except PlannerError as error:
                _tell(f"{library}, {name}: {error}")


def _measure(cases: Sequence[Case], device: str, seconds: float, output: str | None) -> int:
    import torch
    from torch.utils.benchmark import Compare

    from search.probe.device import describe_device, versions
    from search.probe.quiet import QuietWatch, gpu_flags
    from search.tuning.benches.attention import time_case

    known = ", ".join(f"{name} {version}" for name, version in versions().items())
    env = f"{describe_device(device).title}; {known}; {date.today()}"
    _tell(f"{len(cases)} cases to time on {env}.")
    quiet, flags = QuietWatch(), gpu_flags(device)
    measured = []
    for number, case in enumerate(cases, 1):
        _tell(f"{number}/{len(cases)} {case.table}: {case.row}, {case.path}")
        try:
            measured += time_case(case, device, seconds, env)
        except (PlannerError, RuntimeError) as error:  # what a device lacks, memory, a compiler
            _tell(f"  {str(error).partition(chr(10))[0]}")
            continue
        if output is not None:
            torch.save(measured, output)
    if measured:
        say(f"{env}\n\n{Compare(measured)}")
        for flag in (*flags, *quiet.flags()):
            say(
                f"Not quiet: {flag}. Times are too long, and not all by as much: measure again "
                "when the machine is idle."
            )
    return 0 if measured else 1


def _compare(*paths: Path) -> int:
    from torch.utils.benchmark import Compare

    from search.tuning.benches.attention import load

    measured = []
    for path in paths:
        found = load(path)
        say(f"{path}: {found[0].env if found else 'nothing'}")
        for one in found:
            measured.append(replace(one, task_spec=replace(one.task_spec, env=str(path))))
    say(str(Compare(measured)))
    return 0


def _tell(text: str) -> None:
    click.echo(text, err=True)
