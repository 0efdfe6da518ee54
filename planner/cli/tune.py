"""`planner tune`: the fastest setting, found by short training runs."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import click

from planner.cli.arguments import given_fields, split_values
from planner.cli.output import print_json, say
from planner.errors import UsageError
from planner.schema import Model, TrainSetting, parse
from planner.units import parse_percent, parse_seconds

AXES = ("precision", "checkpointing", "compile", "attention", "optimizer")
NOTHING_FITS = 1
COUNT = click.IntRange(1)

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
    from planner.cli.progress import make_progress
    from planner.report.recommendation import recommendation_text
    from search.interrupts import heard
    from search.tuning import ResultNotWrittenError, tune

    show = make_progress()
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
            say("\n" + recommendation_text(found))
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


def _model(text: str | None, overrides: dict[str, Any], replay: bool) -> Model | None:
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
