"""`planner doctor`: is this environment set up to be fast? With `--rates`, how fast it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from planner.cli.arguments import refuse_empty
from planner.cli.command import Command
from planner.cli.output import print_json, say, tell
from planner.core.errors import PlannerError, UsageError
from planner.core.files import cache_directory, unwritable
from planner.machine.doctor import Facts, compare, load_facts, read_facts
from planner.machine.findings import judge
from planner.machine.hardware.detect import read_device
from planner.machine.set_up import lines_to_type
from planner.machine.torch_build import why_not_usable
from planner.report.doctor import comparison_text, facts_text, rates_text

if TYPE_CHECKING:
    from planner.throughput.prediction import DeviceRates


@click.command(
    cls=Command,
    examples=(
        "planner doctor",
        "planner doctor --rates",
        "planner doctor --compare here.json there.json",
    ),
)
@click.argument("files", nargs=-1, metavar="[FILE]…")
@click.option("--compare", "comparing", is_flag=True, help="Show what differs between the FILEs.")
@click.option("--rates", is_flag=True, help="Measure what the device achieves (under 20 s).")
@click.option(
    "--device", metavar="D", help="What --rates measures: auto (the default), cuda:1, cpu."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    files: tuple[str, ...], comparing: bool, rates: bool, device: str | None, as_json: bool
) -> int:
    """Show what is installed, which devices are available, and what slows them down.

    Exits with status 1 if something must be fixed first. A FILE holds a machine as --json wrote it:
    it is judged in place of this one. With --compare the status is 1 if the FILEs differ.
    """
    refuse_empty({"files": files})
    # A typing error is told before anything is examined.
    where = read_device("auto" if device is None else device)
    _check(files, comparing, rates, device)
    if comparing:
        return _compare(files, as_json)
    facts = load_facts(files[0]) if files else read_facts()
    measured = _measure(_device(where, facts), facts) if rates else None
    findings = judge(facts)
    is_healthy = all(finding.level != "fault" for finding in findings)
    if as_json:
        typed = [line for _, line in lines_to_type(facts)]
        found = {"healthy": is_healthy, "findings": [asdict(f) for f in findings]}
        rated = measured and asdict(measured)
        print_json({**found, "to_type": typed, "machine": facts, "rates": rated})
    else:
        say(facts_text(facts))
        if measured:
            say(rates_text(measured))
    return 0 if is_healthy else 1


def _check(files: Sequence[str], comparing: bool, rates: bool, device: str | None) -> None:
    if comparing and len(files) < 2:
        raise UsageError(
            f"--compare needs two FILEs or more, not {len(files)}.",
            "Write each with 'planner doctor --json > NAME.json' and name them all.",
        )
    if len(files) > 1 and not comparing:
        raise UsageError(f"{len(files)} files were given.", "Name one, or add --compare.")
    if files and rates:
        raise UsageError("--rates measures this machine, and a FILE is of another.", "Omit one.")
    if device is not None and not rates:
        raise UsageError("--device says what --rates measures.", "Add it, or omit --device.")


def _compare(files: Sequence[str], as_json: bool) -> int:
    is_plain = len({Path(file).stem for file in files}) == len(files)
    machines = {Path(file).stem if is_plain else file: load_facts(file) for file in files}
    differences = compare(machines)
    if as_json:
        findings = {t: [asdict(found) for found in judge(f)] for t, f in machines.items()}
        print_json({"differences": differences, "findings": findings})
    else:
        say(comparison_text(machines, differences))
    return 1 if differences else 0


def _device(device: str, facts: Facts) -> str:
    """ "auto", "cpu" or "cuda:N" as a device that can be used. Raises PlannerError."""
    if device == "auto":
        why = why_not_usable(facts.torch)
        if why is not None and facts.cards:
            click.echo(f"Measuring the CPU: {why}.", err=True)
        return "cuda:0" if why is None else "cpu"
    why = why_not_usable(facts.torch, int(device[5:])) if device != "cpu" else None
    if why is not None:
        raise PlannerError(f"{device!r} cannot be used: {why}.", "Pass auto or cpu.")
    return device


def _measure(device: str, facts: Facts) -> DeviceRates:
    """The rates of `device`, numbered by its bus as everywhere here; kept, unless others or
    throttling disturbed them."""
    from planner.throughput.measured import (
        measure_rates,
        measuring_environment,
        save_rates,
        why_impossible,
    )
    from search.probe.device_rates import watched

    kind, _, index = device.partition(":")
    memory_bytes = facts.torch.gpus[int(index or 0)].total_bytes if kind == "cuda" else None
    click.echo(f"Measuring {device} …", err=True)
    with (
        watched(device if kind == "cpu" else f"cuda:{index or 0}") as disturbances,
        measuring_environment(),
    ):
        measured = measure_rates(device)
    if why := why_impossible(measured, memory_bytes):
        raise PlannerError(
            f"{device}: {why}.", "Nothing is kept. See whether this GPU is emulated or shared."
        )
    _keep(disturbances, lambda: save_rates(measured, memory_bytes=memory_bytes))
    return measured


def _keep(disturbances: Sequence[str], save: Callable[[], object]) -> None:
    """Keeps what was measured, unless something disturbed it, and says which."""
    if disturbances:
        tell(f"Not kept: {'; '.join(dict.fromkeys(disturbances))}.")
        return
    try:
        tell(f"Kept in {save()}")
    except OSError as error:
        tell(f"Not kept: {unwritable(cache_directory(), error, 'set PLANNER_CACHE_DIR')}")
