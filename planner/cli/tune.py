"""`planner tune`: the fastest setting, found by short training runs."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from planner.cli.arguments import given_fields, split_values
from planner.cli.output import print_json, say
from planner.errors import UsageError, printable
from planner.schema import SwinConfig, TrainSetting, parse
from planner.schema.record import FactoryModel, MeasurementRecord
from planner.schema.result import Recommendation
from planner.units import format_bytes, format_seconds, parse_percent, parse_seconds

if TYPE_CHECKING:
    from search.session import Progress

AXES = ("precision", "checkpointing", "compile", "attention", "optimizer")
NOTHING_FITS = 1
COUNT = click.IntRange(1)
MAX_RULED_OUT = 12  # lines; recommendation.json has them all

_OPTIONS: list[Callable[[Any], Any]] = [
    click.argument("model", required=False),
    click.option("--batch-size", metavar="N[,N…]", help="Only these micro-batches."),
    click.option("--global-batch", type=COUNT, metavar="N",
                 help="Hold micro-batch × accumulation × world at N exactly."),
    click.option("--accumulate", metavar="N", help="Micro-batches per step (1)."),
    click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda:0 …"),
    click.option("--memory", metavar="SIZE", help="Emulate a smaller device: 24GiB, 24GB."),
    click.option("--headroom", default="5%", show_default=True, help="Memory to keep free."),
    click.option("--precision", metavar="P[,P…]", help="Of fp32, tf32, bf16, fp16."),
    click.option("--checkpointing", metavar="C", multiple=True,
                 help="Of none, blocks, stages, stages:0,1, nested; repeat it for several."),
    click.option("--compile", metavar="C[,C…]",
                 help="Of off, default, reduce-overhead, max-autotune."),
    click.option("--attention", metavar="A[,A…]", help="Of eager, sdpa."),
    click.option("--optimizer", metavar="O[,O…]", help="As adamw, adamw-fused, sgd."),
    click.option("--image-size", metavar="PX", help="As 384 or 256,192."),
    click.option("--num-classes", metavar="N"),
    click.option("--drop-path", metavar="RATE"),
    click.option("--set", "fields", multiple=True, metavar="FIELD=VALUE",
                 help="Any field of the model or of the setting."),
    click.option("--trials", type=click.IntRange(0), metavar="N",
                 help="At most N probes in the study."),
    click.option("--budget", default="10m", show_default=True, metavar="TIME",
                 help="Time for probes (90s, 10m, 1h30m), or none."),
    click.option("--tolerance", default="0.5%", show_default=True,
                 help="Stop when all further probes are expected to gain less."),
    click.option("--strategy", default="planner", show_default=True,
                 help="planner, tpe, gp, random, or a baseline."),
    click.option("--steps", type=COUNT, metavar="N",
                 help="Rank by the total time of N optimizer steps, compilation included."),
    click.option("--epochs", type=click.FloatRange(0, min_open=True), metavar="N",
                 help="The same for N epochs."),
    click.option("--images-per-epoch", type=COUNT, metavar="N",
                 help="ImageNet-1k's unless given."),
    click.option("--replay", metavar="FILE", help="Search recorded probes, not a device."),
    click.option("--storage", metavar="URL", help="Any Optuna storage, or a .journal file."),
    click.option("--study-name", default="planner", show_default=True),
    click.option("--output", metavar="DIR", help="Default: tune-LIBRARY-NAME."),
    click.option("--accept-different", is_flag=True,
                 help="Go on with a study of another device or software."),
    click.option("--no-baseline", is_flag=True, help="Do not measure the plain default."),
    click.option("--seed", type=click.IntRange(0), default=0, show_default=True),
    click.option("--json", "as_json", is_flag=True, help="Print recommendation.json."),
]  # fmt: skip


def _with_options(function: Callable[..., int]) -> Callable[..., int]:
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@click.command()
@_with_options
def command(**given: Any) -> int:
    """Find the fastest way to train MODEL on a device, by short real training runs.

    MODEL is LIBRARY:NAME, a YAML or JSON file, or package.module:factory; with --replay it may be
    left out. The same command goes on where it was stopped. Ctrl-C ends with the best so far.
    """
    from search.interrupts import heard
    from search.tuning import ResultNotWrittenError, tune

    show = _shower()
    with heard(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as interrupts:
        unwritten: ResultNotWrittenError | None = None
        try:
            found = tune(**_arguments(given), on_progress=show)
        except KeyboardInterrupt:
            show.close()
            click.echo("Error: interrupted before anything was found.", err=True)
            return interrupts.exit_status
        except ResultNotWrittenError as error:
            found, unwritten = error.recommendation, error
        finally:
            show.close()
        if given["as_json"]:
            print_json(found.model_dump(mode="json"))
        else:
            print_recommendation(found)
        if interrupts.number is not None:
            return interrupts.exit_status
    if unwritten is not None:
        raise unwritten
    return 0 if found.status == "recommended" else NOTHING_FITS


def _arguments(given: dict[str, Any]) -> dict[str, Any]:
    """What was typed, as the parameters of `tune`. Raises UsageError."""
    model_fields, setting_fields = given_fields(given, (*AXES, "batch_size", "accumulate"))
    restrict = {
        axis: tuple(split_values(setting_fields.pop(axis)))
        for axis in AXES
        if axis in setting_fields
    }
    sizes = setting_fields.pop("batch_size", None)
    budget = given["budget"].strip().lower()
    arguments = {
        "model": _model(given["model"], model_fields, replay=given["replay"] is not None),
        "memory_bytes": given["memory"],
        "headroom": parse_percent(given["headroom"]),
        "batch_size": None if sizes is None else tuple(sizes.split(",")),
        "base": parse(TrainSetting, setting_fields, "--set"),
        "restrict": restrict,
        "budget_seconds": None if budget == "none" else parse_seconds(budget),
        "tolerance": parse_percent(given["tolerance"]),
        "baseline": not given["no_baseline"],
    }
    same = (
        "device", "global_batch", "trials", "strategy", "storage", "study_name", "output",
        "replay", "steps", "epochs", "accept_different", "seed",
    )  # fmt: skip
    arguments.update({name: given[name] for name in same})
    if given["images_per_epoch"] is not None:
        arguments["images_per_epoch"] = given["images_per_epoch"]
    return arguments


def _model(
    text: str | None, overrides: dict[str, Any], replay: bool
) -> SwinConfig | FactoryModel | None:
    from planner.libraries.resolve import resolve_model

    if text is not None:
        return resolve_model(text, overrides)
    if replay:
        if overrides:
            raise UsageError(
                f"--replay has its own model, and {', '.join(overrides)} would be of another.",
                "Name a MODEL, or leave them out.",
            )
        return None
    raise UsageError(
        "there is no MODEL.", "Write planner tune native:swin_tiny, or list them: planner models."
    )


class PlainLines:
    """Progress where nobody watches: a line when a probe begins or ends."""

    def __call__(self, progress: Progress) -> None:
        line = describe_progress(progress)
        if line:
            _say(line)

    def close(self) -> None:
        return None


class LiveLine:
    """Progress on a terminal: ended probes as lines, and one line that lives."""

    def __init__(self) -> None:
        self.current: Progress | None = None
        self.width = 0

    def __call__(self, progress: Progress) -> None:
        if progress.kind == "start":
            self.current = progress
        elif progress.kind == "end":
            self._erase()
            _say(describe_progress(progress))
            self.current = None
        elif progress.kind == "note":
            self._erase()
            _say(progress.text)
        if self.current is not None:
            self._draw(self.current, progress)

    def _draw(self, current: Progress, progress: Progress) -> None:
        doing = progress.text if progress.kind == "step" else "start"
        if progress.step_seconds:
            doing += f" {format_seconds(progress.step_seconds)} a step"
        line = f"{describe_progress(current)} · {doing}"[: _columns() - 1]
        _say(line.ljust(self.width), before="\r", after="")
        self.width = len(line)

    def _erase(self) -> None:
        if self.width:
            _say(" " * self.width, before="\r", after="\r")
        self.width = 0

    def close(self) -> None:
        self._erase()


def _say(text: str, before: str = "", after: str = "\n") -> None:
    """Progress, on standard error. Where nobody can read it (a closed terminal, a full disk) the
    search goes on: its results are in files."""
    with suppress(OSError):
        click.echo(f"{before}{printable(text)}{after}", nl=False, err=True)


def _columns() -> int:
    import shutil

    return shutil.get_terminal_size().columns


def _shower() -> LiveLine | PlainLines:
    return LiveLine() if sys.stderr.isatty() else PlainLines()


def describe_progress(progress: Progress) -> str:
    """One line: phase, probe n of N, the setting, what it found, the best so far, time left."""
    if progress.kind == "note":
        return progress.text
    if progress.kind not in ("start", "end") or progress.candidate is None:
        return ""
    of = f" of {progress.num_probes}" if progress.num_probes else ""
    parts = [f"[{progress.phase}] probe {progress.probe}{of}: {short(progress.candidate.setting)}"]
    if progress.record is not None:
        parts.append(found_text(progress.record))
    if progress.best_rate:
        parts.append(f"best {progress.best_rate:.4g} images/s")
    if progress.seconds_left is not None:
        parts.append(f"{format_seconds(progress.seconds_left)} left")
    return " · ".join(parts)


def found_text(record: MeasurementRecord) -> str:
    """`123 images/s, 4.5 GiB`, or how the probe ended instead."""
    if record.status != "measured" or record.images_per_second is None:
        reason = record.message.splitlines()[0][:100] if record.message else ""
        return record.status.replace("_", " ") + (f" ({reason})" if reason else "")
    return f"{record.images_per_second:.4g} images/s, {_memory(record)}"


def short(setting: TrainSetting) -> str:
    """`batch 64 bf16 compile default sdpa`: what a person tells settings apart by."""
    words = [f"batch {setting.batch_size}"]
    if setting.accumulate > 1:
        words.append(f"× {setting.accumulate}")
    words.append(setting.precision)
    if setting.checkpointing != "none":
        words.append(f"checkpoint {setting.checkpointing}")
    if setting.compile != "off":
        words.append(f"compile {setting.compile}")
    if setting.attention != "library":
        words.append(setting.attention)
    words.append(setting.optimizer)
    return " ".join(words)


def print_recommendation(found: Recommendation) -> None:
    """The recommendation as a person reads it: measured figures, evidence, the others, the rest."""
    say()
    if found.setting is None or found.evidence is None:
        say(f"Nothing to recommend after {_probes(found)}: {found.stopped_because}.")
        say(found.advice)
    else:
        say(f"Recommended for {found.model.title} on {found.device.name} (measured):")
        say(f"  {short(found.setting)}")
        say(f"  {_evidence(found.evidence)}")
        say(f"  {_gain(found)}")
        say()
        _table([found.evidence, *found.runners_up], found.baseline)
    say()
    for note in found.notes:
        say(f"- {note}")
    say(
        f"- {_probes(found)} of {found.num_candidates} settings; ended because "
        f"{found.stopped_because}."
    )
    _print_ruled_out(found)


def _probes(found: Recommendation) -> str:
    return "1 probe" if found.num_probes == 1 else f"{found.num_probes} probes"


def _evidence(record: MeasurementRecord) -> str:
    from search.surrogate.noise import rate_interval

    images = record.setting.batch_size * record.setting.accumulate
    low, high = rate_interval(images, record.step_seconds)
    return (
        f"{record.images_per_second or 0:.4g} images/s ({low:.4g} to {high:.4g}, "
        f"{len(record.step_seconds)} steps), {_memory(record)}, probe {record.probe_id[:8]} of "
        f"{record.date[:16].replace('T', ' ')}"
    )


def _gain(found: Recommendation) -> str:
    if found.baseline is None or found.gain is None:
        return "The plain default was not measured, so no gain can be given."
    return (
        f"{found.gain:.2f} × the plain default ({short(found.baseline.setting)}: "
        f"{found.baseline.images_per_second or 0:.4g} images/s)"
    )


def _table(records: Sequence[MeasurementRecord], baseline: MeasurementRecord | None) -> None:
    from planner.cli.output import print_table

    headers = ["", "setting", "images/s", "step", "memory", "compile"]
    rows = []
    for i, record in enumerate(records):
        rows.append([str(i + 1), *_cells(record)])
    if baseline is not None and baseline not in records:
        rows.append(["plain", *_cells(baseline)])
    print_table(rows, headers)


def _cells(record: MeasurementRecord) -> list[str]:
    compiling = record.compile_seconds
    rate = record.images_per_second or 0.0
    images = record.setting.batch_size * record.setting.accumulate
    return [
        short(record.setting),
        f"{rate:.4g}",
        format_seconds(images / rate) if rate else "-",
        _memory(record),
        format_seconds(compiling) if compiling else "-",
    ]


def _memory(record: MeasurementRecord) -> str:
    from search.surrogate.prior import record_bytes

    num_bytes = record_bytes(record)
    return "memory unknown" if num_bytes is None else format_bytes(num_bytes)


def _print_ruled_out(found: Recommendation) -> None:
    if not found.ruled_out:
        return
    say("- Not probed (these batches and larger ones):")
    for ruled in found.ruled_out[:MAX_RULED_OUT]:
        say(f"    {short(ruled.setting)}: {ruled.reason}")
    more = len(found.ruled_out) - MAX_RULED_OUT
    if more > 0:
        say(f"    and {more} more, in recommendation.json")
