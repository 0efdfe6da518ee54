"""`planner profile`: where the time of a step goes, measured beside predicted."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.cli.arguments import (
    GRID_FIELDS,
    given_fields,
    model_and_settings,
    read_duration,
    refuse_empty,
    with_model_options,
)
from planner.cli.command import Command
from planner.cli.output import print_json, say, tell
from planner.core.errors import UsageError
from planner.core.files import TUNE_RESULT
from planner.core.schema import Model, TrainSetting, parse
from planner.core.units import format_seconds
from planner.estimation.estimate import resolve
from planner.trainers.emission import read_result
from search import check_platform

if TYPE_CHECKING:
    from search.probe.parent.runner import ProbeEvent

_TOLD = {
    "build": "Building the model", "compile": "Compiling", "measure": "Timing plain steps",
    "profile": "Profiling",
}  # fmt: skip


@click.command(
    cls=Command,
    headings={"Profiling": ("steps", "deadline")},
    examples=(
        "planner profile run",
        "planner profile native:swin_tiny --device cpu --batch-size 2 --steps 1",
    ),
)
@click.argument("target", metavar="RUN|MODEL")
@with_model_options
@click.option("--device", default="auto", show_default=True, metavar="D", help="cpu, cuda, cuda:1.")
@click.option(
    "--steps", type=click.IntRange(1, 100), default=3, show_default=True, metavar="N",
    help="Steps under the profiler.",
)  # fmt: skip
@click.option(
    "--deadline", default="15m", show_default=True, metavar="TIME", help="End it after this time."
)
@click.option(
    "--output", type=click.Path(), default="profile", show_default=True,
    metavar="DIR", help="Where its files go.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print profile.json.")
def command(target: str, **given: Any) -> int:
    """Run a setting under torch's profiler: where its time goes, measured beside predicted.

    RUN is a folder or a recommendation.json of 'planner tune': its recommended setting runs,
    changed by the options given. MODEL is as for 'planner estimate'. DIR then holds the trace (open
    trace.json.gz at ui.perfetto.dev) and profile.json.
    """
    refuse_empty({"target": target, **given})
    check_platform()
    deadline = read_duration("--deadline", given["deadline"])
    model, setting = _asked(target, given)
    from planner.report.profile import profile_text
    from search.loop.interrupts import handle_signals
    from search.tuning.profiling import profile

    with handle_signals(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as interrupts:
        try:
            found = profile(
                model, setting, Path(given["output"]), device=given["device"], steps=given["steps"],
                deadline_seconds=deadline, on_event=_Phases(),
                say=lambda text: click.echo(text, err=True),
            )  # fmt: skip
        except KeyboardInterrupt:
            click.echo("Error: interrupted: no profile was written.", err=True)
            return interrupts.exit_status
    if given["as_json"]:
        print_json(found.model_dump(mode="json"))
    else:
        say(profile_text(found))
        names = ", ".join(found.files)
        tell(f"\nWrote {names} into {given['output']}.")
    return 0


def _asked(target: str, given: dict[str, Any]) -> tuple[Model, TrainSetting]:
    """The model and the one setting meant, as the library runs it. Raises UsageError."""
    if _is_run(target):
        return _recommended(target, given)
    try:
        model, settings = model_and_settings(target, given)
    except UsageError as error:
        if ":" not in target and error.message.startswith("unknown model"):
            raise UsageError(
                f"there is no run {target} and no such model.",
                "RUN is a folder that 'planner tune' wrote. List models with 'planner models'.",
            ) from None
        raise
    if len(settings) > 1:
        raise UsageError(
            f"a profile is of one setting, and {len(settings)} were given.",
            "Give one value to each option.",
        )
    return resolve(model, settings[0])


def _is_run(target: str) -> bool:
    """A folder (but for a model of transformers), or a recommendation by its name."""
    path = Path(target)
    if path.is_dir():
        return not (path / "config.json").is_file()
    return path.name == TUNE_RESULT


def _recommended(target: str, given: dict[str, Any]) -> tuple[Model, TrainSetting]:
    found = read_result(target)
    if found.setting is None:
        raise UsageError(f"{target} recommends nothing: {found.stopped_because}.", found.advice)
    of_model, of_setting = given_fields(given, GRID_FIELDS)
    if of_model:
        raise UsageError(
            f"{', '.join(of_model)} would make another model than the one that was tuned.",
            "Name the MODEL in place of the run.",
        )
    changed = parse(TrainSetting, {**found.setting.model_dump(), **of_setting}, "the setting")
    return resolve(found.model, changed)


class _Phases:
    """Says on standard error which phase a profile has come to."""

    def __init__(self) -> None:
        self.phase = ""

    def __call__(self, event: ProbeEvent) -> None:
        if event.phase != self.phase and event.phase in _TOLD:
            self.phase = event.phase
            click.echo(f"{_TOLD[event.phase]} ({format_seconds(event.elapsed_seconds)})", err=True)
