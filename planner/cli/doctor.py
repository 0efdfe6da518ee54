"""`planner doctor`: is this environment set up to be fast? With `--rates`, how fast its device is;
with `--links`, how fast its devices exchange data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.cli.arguments import refuse_empty
from planner.cli.command import Command
from planner.cli.output import print_json, say, tell
from planner.core.errors import PlannerError, UsageError
from planner.core.files import cache_directory, check_output, unwritable
from planner.machine.doctor import Checkup, check_environment, check_machine
from planner.machine.hardware.detect import read_device
from planner.machine.links.plan import plan_link
from planner.machine.machine import load_machine
from planner.machine.torch_build import why_not_usable
from planner.report.environment import (
    checkup_text,
    comparison_text,
    link_text,
    rates_text,
    together_text,
)

if TYPE_CHECKING:
    from planner.core.schema.link import LinkCurve
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
@click.option(
    "--together",
    is_flag=True,
    help="With --compare: put first what one training over all of these machines needs alike.",
)
@click.option("--rates", is_flag=True, help="Measure what the device achieves (under 20 s).")
@click.option("--links", is_flag=True, help="Time collectives between the devices (a minute).")
@click.option(
    "--device",
    metavar="D",
    help="What --rates and --links measure: auto (the default), cuda:1, cpu.",
)
@click.option(
    "--gpus",
    type=click.IntRange(2),
    metavar="N",
    help="How many devices --links uses (default: all; on the CPU 2).",
)
@click.option(
    "--output", metavar="FILE", type=click.Path(), help="Write what --links measured to FILE."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(files: tuple[str, ...], as_json: bool, **asked: Any) -> int:
    """Show what is installed, which devices are available, and what slows them down.

    Exits with status 1 if something must be fixed first. A FILE holds a machine as --json wrote it:
    it is judged in place of this one. With --compare the status is 1 if the FILEs differ; with
    --together too, if they differ in what one training over all of them needs alike.
    """
    refuse_empty({"files": files, "output": asked["output"]})
    wish = _Wish(**asked)
    # A typing error is told before anything is examined.
    where = read_device("auto" if wish.device is None else wish.device)
    _check(files, wish)
    if wish.comparing:
        return _compare(files, as_json, wish.together)
    checkup = check_machine(load_machine(files[0])) if files else check_environment()
    measured = _measure(_device(where, checkup), checkup) if wish.rates else None
    link = _measure_link(where, wish.gpus, checkup, wish.output) if wish.links else None
    if as_json:
        print_json({
            **checkup.to_json(),
            "rates": measured and asdict(measured),
            "link": link and link.model_dump(),
        })  # fmt: skip
    else:
        say(checkup_text(checkup))
        if measured:
            say(rates_text(measured))
        if link:
            say(link_text(link))
    return 0 if checkup.is_healthy else 1


@dataclass(frozen=True)
class _Wish:
    """The options, as they were typed."""

    comparing: bool
    together: bool
    rates: bool
    links: bool
    device: str | None
    gpus: int | None
    output: str | None


def _check(files: Sequence[str], wish: _Wish) -> None:
    if wish.comparing and len(files) < 2:
        raise UsageError(
            f"--compare needs two FILEs or more, not {len(files)}.",
            "Write each with 'planner doctor --json > NAME.json' and name them all.",
        )
    if wish.together and not wish.comparing:
        raise UsageError("--together is of --compare.", "Add --compare, or omit --together.")
    if len(files) > 1 and not wish.comparing:
        raise UsageError(f"{len(files)} files were given.", "Name one, or add --compare.")
    measuring = "--rates" if wish.rates else "--links"
    if files and (wish.rates or wish.links):
        raise UsageError(f"{measuring} measures this machine, and a FILE is of another.",
                         "Omit one.")  # fmt: skip
    if wish.device is not None and not (wish.rates or wish.links):
        raise UsageError(
            "--device says what --rates and --links measure.", "Add one, or omit --device."
        )
    for option, value in (("--gpus", wish.gpus), ("--output", wish.output)):
        if value is not None and not wish.links:
            raise UsageError(f"{option} is of --links.", f"Add --links, or omit {option}.")
    if wish.output is not None:  # before a minute of measuring
        check_output(wish.output, "a link", ("",))


def _compare(files: Sequence[str], as_json: bool, together: bool) -> int:
    from planner.machine.layers import compare
    from planner.machine.together import matters_together, sorted_together

    titles = list(files) if len({Path(f).stem for f in files}) < len(files) else [
        Path(f).stem for f in files
    ]  # fmt: skip
    checkups = {t: check_machine(load_machine(f)) for t, f in zip(titles, files, strict=True)}
    differences = compare({title: checkup.facts for title, checkup in checkups.items()})
    joint = [d for d in sorted_together(differences) if matters_together(d)] if together else []
    if as_json:
        print_json({
            "machines": list(files),
            "differences": [asdict(difference) for difference in differences],
            **({"together": {f"{d.layer}: {d.name}": matters_together(d) for d in joint}}
               if together else {}),
            "findings": {title: [asdict(finding) for finding in checkup.findings]
                         for title, checkup in checkups.items()},
        })  # fmt: skip
    else:
        if together:
            say(together_text(checkups, joint) + "\n")
        rest = [difference for difference in differences if difference not in joint]
        if rest or not together:
            say(comparison_text(checkups, rest))
    return 1 if (joint if together else differences) else 0


def _device(device: str, checkup: Checkup) -> str:
    """ "auto", "cpu" or "cuda:N" as a device that can be used. Raises PlannerError."""
    if device == "auto":
        why = why_not_usable(checkup.torch)
        if why is not None and checkup.facts.cards:
            click.echo(f"Measuring the CPU: {why}.", err=True)
        return "cuda:0" if why is None else "cpu"
    why = why_not_usable(checkup.torch, int(device[5:])) if device != "cpu" else None
    if why is not None:
        raise PlannerError(f"{device!r} cannot be used: {why}.", "Pass auto or cpu.")
    return device


def _measure(device: str, checkup: Checkup) -> DeviceRates:
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
    memory_bytes = checkup.torch.gpus[int(index or 0)].total_bytes if kind == "cuda" else None
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


def _measure_link(
    where: str, world_size: int | None, checkup: Checkup, output: str | None
) -> LinkCurve:
    """The link between this machine's devices; kept, unless others or throttling disturbed them."""
    from contextlib import ExitStack

    from planner.machine.hardware.link_file import write_link
    from planner.machine.links.kept import save_link
    from search.probe.device_rates import watched
    from search.tuning.links.timing import measure_link

    plan = plan_link(where, world_size, checkup.facts)
    what = "GPUs over NCCL" if plan.backend == "nccl" else "processes over gloo"
    click.echo(f"Timing collectives between {plan.world_size} {what} …", err=True)
    with ExitStack() as watches:
        disturbances = [
            watches.enter_context(watched(f"cuda:{number}"))
            for number in range(plan.world_size if plan.backend == "nccl" else 0)
        ]
        curve = measure_link(plan)
    if output is not None:
        try:
            write_link(output, curve)
        except OSError as error:
            raise unwritable(output, error) from None
        tell(f"Written to {output}")
    _keep([text for texts in disturbances for text in texts], lambda: save_link(curve))
    return curve
