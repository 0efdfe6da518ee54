"""`planner tune`: the fastest setting, found by short training runs."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from planner.cli.arguments import (
    MODEL_FLAGS,
    axis_flags,
    detail_flag,
    given_fields,
    read_piped,
    split_values,
    way_flag,
    with_options,
)
from planner.cli.command import Command
from planner.cli.progress import quiet_flag
from planner.cli.search_flags import said_options, search_flags
from planner.core.errors import UsageError
from planner.core.schema import Model, SwinConfig, TrainSetting, parse
from planner.core.schema.distribution import PARALLELISMS, Distribution
from planner.core.schema.result import Recommendation
from planner.estimation.arguments import read_model
from planner.estimation.kept import Predicted, is_predicted, read_predicted
from search import check_platform
from search.loop.axes import AXES, HELD, held_error
from search.loop.options import SearchOptions

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
    click.option(
        "--from", "from_", type=click.Path(allow_dash=True), metavar="FILE",
        help="Begin at what 'planner advise' or 'planner estimate' printed with --json (- is "
        "standard input): its model, memory and setting; options typed here win.",
    ),
    way_flag,
    *search_flags(SearchOptions),
    quiet_flag,
    detail_flag,
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
    """Find the fastest way to train MODEL on a device, by short real training runs (probes).

    MODEL is LIBRARY:NAME, a YAML or JSON file, or package.module:factory; with --replay or --from
    it may be omitted. Run the same command again to continue where it stopped; Ctrl-C ends it with
    the best setting so far.
    """
    check_platform()
    from planner.cli.searching import search_and_print
    from planner.report.searches import recommendation_answer
    from planner.report.text import parts_text
    from search.runs.reading import interval_of
    from search.tuning.tune import tune

    asked = _arguments(given)
    named = given["model"] or given["replay"] or (asked["model"].title if given["from_"] else "")
    return search_and_print(
        lambda on_progress: tune(**asked, on_progress=on_progress),
        f"planner tune {named}",
        lambda found: parts_text(
            recommendation_answer(found, interval_of, _next(found, given)), given["detail"]
        ),
        lambda found: found.status == "recommended",
        given["quiet"],
        given["as_json"],
    )


def _next(found: Recommendation, given: Mapping[str, Any]) -> str:
    """What to do with a recommendation that was kept, and where it is."""
    from search.tuning.tune import default_output

    if found.setting is None or (given["replay"] and not given["output"]):
        return ""
    folder = shlex.quote(str(given["output"] or default_output(found.model)))
    return f"Next: planner emit {folder} --for TRAINER, or planner report {folder}"


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
    typed = {
        "batch_size": None if sizes is None else tuple(sizes.split(",")),
        "base": parse(TrainSetting, held, "--set"),
        "restrict": restrict,
        **dict(said_options(SearchOptions, given)),
    }
    if given["from_"] is None:
        if given["way"] is not None:
            raise UsageError("--way chooses among what --from names.", "Add --from FILE.")
        return {"model": _model(given["model"], model_fields, replay="replay" in typed), **typed}
    if "replay" in typed:
        raise UsageError("--from begins a search on a device, and --replay needs none: omit one.")
    return _from_predicted(_predicted(given), given, model_fields, held, typed)


def _predicted(given: Mapping[str, Any]) -> Predicted:
    """What --from names. Raises UsageError and UnsupportedError."""
    from planner.core.files import MAX_RESULT_BYTES, parse_json, read_text

    path = given["from_"]
    data, source = read_piped(path), "standard input"
    if path != "-":
        data, source = parse_json(read_text(Path(path), MAX_RESULT_BYTES), path), path
    if not is_predicted(data):
        raise UsageError(
            f"{source} is not what `planner advise` or `planner estimate` prints with --json.",
            "A study is gone on with by the command that began it.",
        )
    return read_predicted(data, source, given["way"])


def _from_predicted(
    found: Predicted, given: Mapping[str, Any], of_model: dict[str, Any], held: dict[str, str],
    typed: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """The parameters of `tune` that begin at a predicted setting; those that were `typed` win."""
    setting = found.setting.without_recipe(isinstance(found.model, SwinConfig))
    sized = typed["batch_size"] is not None or "global_batch" in typed
    share = None if sized or "accumulate" in held else found.share
    gone = {*AXES, "batch_size", *({"accumulate"} if sized or share else ())}
    if "gpus" in typed or "world_size" in held:  # spread as it is typed
        gone |= set(Distribution.model_fields)
    base = {**setting.model_dump(exclude=gone), **held}
    if setting.optimizer_implementation in ("foreach", "fused"):
        base["optimizer"] = setting.optimizer_family
    limits: dict[str, Any] = {
        "memory_bytes": found.memory_bytes,
        "allocator": found.allocator,
        "global_batch": share and share * setting.world_size,
        "start": None if found.lacks else setting.model_dump(include={*AXES, "batch_size"}),
    }
    how = f"is not probed first: it {found.lacks}" if found.lacks else "is probed first"
    click.echo(
        f"From {found.source}, the setting predicted at {found.said} on {found.where} {how}.",
        err=True,
    )
    text = given["model"]
    model = read_model(found.model, of_model) if text is None else _model(text, of_model, False)
    return {
        "model": model,
        **{name: value for name, value in limits.items() if value is not None},
        **typed,
        "base": parse(TrainSetting, base, found.source),
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
