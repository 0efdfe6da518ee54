"""`planner tune`: the fastest setting, found by short training runs."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import Any

import click

from planner.cli.arguments import (
    MODEL_FLAGS,
    axis_flags,
    given_fields,
    split_values,
    with_options,
)
from planner.cli.command import Command
from planner.cli.progress import quiet_flag
from planner.cli.search_flags import said_options, search_flags
from planner.errors import UsageError
from planner.schema import Model, TrainSetting, parse
from planner.schema.distribution import PARALLELISMS
from planner.schema.result import Recommendation
from search import check_platform
from search.axes import AXES, HELD, held_error
from search.options import SearchOptions

_OPTIONS: list[Callable[[Any], Any]] = [
    click.argument("model", required=False),
    click.option("--batch-size", metavar="N[,N…]", help="Try only these micro-batches."),
    click.option("--accumulate", metavar="N", help="Micro-batches per step (default: 1)."),
    *axis_flags(searched=True),
    click.option(
        "--parallelism", metavar="P[,P…]",
        help=f"How to spread over GPUs: {', '.join(PARALLELISMS[1:])} (default on several: ddp).",
    ),
    *MODEL_FLAGS,
    *search_flags(SearchOptions),
    quiet_flag,
    click.option("--json", "as_json", is_flag=True, help="Print recommendation.json."),
]  # fmt: skip


@click.command(
    cls=Command,
    examples=(
        "planner tune native:swin_tiny --budget 10m --output run",
        "planner tune native:swin_tiny --precision bf16 --checkpointing none,blocks --trials 20",
    ),
)
@with_options(_OPTIONS)
def command(**given: Any) -> int:
    """Find the fastest way to train MODEL on a device, by short real training runs.

    MODEL is LIBRARY:NAME, a YAML or JSON file, or package.module:factory; with --replay it may be
    omitted. Run the same command again to continue where it stopped; Ctrl-C ends it with the best
    setting so far.
    """
    check_platform()
    from planner.cli.searching import search_and_print
    from planner.report.recommendation import recommendation_text
    from search.tuning import tune

    return search_and_print(
        lambda on_progress: tune(**_arguments(given), on_progress=on_progress),
        f"planner tune {given['model'] or given['replay'] or ''}",
        lambda found: recommendation_text(found) + _next(found, given),
        lambda found: found.status == "recommended",
        given["quiet"],
        given["as_json"],
    )


def _next(found: Recommendation, given: Mapping[str, Any]) -> str:
    """What to do with a recommendation that was kept, and where it is."""
    from search.tuning import default_output

    if found.setting is None or (given["replay"] and not given["output"]):
        return ""
    folder = shlex.quote(str(given["output"] or default_output(found.model)))
    return f"\n\nNext: planner emit {folder} --for TRAINER, or planner report {folder}"


def _arguments(given: dict[str, Any]) -> dict[str, Any]:
    """What was typed, as the parameters of `tune`. Raises UsageError."""
    model_fields, setting_fields = given_fields(
        given, (*AXES, "batch_size", "accumulate", "parallelism")
    )
    sizes = setting_fields.pop("batch_size", None)
    held = {field: setting_fields.pop(field) for field in HELD if field in setting_fields}
    for field, text in held.items():
        if "," in text:
            raise held_error(field)
    restrict = {field: tuple(split_values(text)) for field, text in setting_fields.items()}
    return {
        "model": _model(given["model"], model_fields, replay=given["replay"] is not None),
        "batch_size": None if sizes is None else tuple(sizes.split(",")),
        "base": parse(TrainSetting, held, "--set"),
        "restrict": restrict,
        **dict(said_options(SearchOptions, given)),
    }


def _model(text: str | None, overrides: dict[str, Any], replay: bool) -> Model | None:
    from planner.libraries.resolve import resolve_model

    if text is not None:
        return resolve_model(text, overrides)
    if replay:
        if overrides:
            raise UsageError(
                "--replay reads the model from its file, so "
                f"{', '.join(overrides)} cannot be changed.",
                "Name a MODEL, or omit these options.",
            )
        return None
    raise UsageError(
        "no MODEL was named.",
        "Write for example 'planner tune native:swin_tiny', or list models with 'planner models'.",
    )
