"""`planner explain`: why a training ended, from its log or a snapshot of its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from planner.cli.arguments import GRID_FIELDS, given_fields, model_and_settings, with_model_options
from planner.cli.command import Command
from planner.cli.output import print_json, say
from planner.core.errors import UsageError, shorten
from planner.core.files import is_pipe
from planner.core.terminal import shows_seconds


@click.command(
    cls=Command,
    headings={"The training": ("plan", "gpu", "allocator")},
    examples=(
        "planner explain train.log",
        "planner explain train.log --plan run",
        "planner explain - --plan run",
    ),
)
@click.argument("source", metavar="SNAPSHOT|LOG")
@click.argument("model", required=False)
@click.option("--plan", metavar="RUN", help="What 'planner tune' wrote: the setting that trained.")
@click.option("--gpu", metavar="NAME", help="The card, of 'planner gpus'.")
@click.option("--allocator", metavar="OPTIONS", help="Used in place of PYTORCH_ALLOC_CONF.")
@with_model_options
@click.option("--json", "as_json", is_flag=True, help="One object.")
def command(source: str, model: str | None, **given: Any) -> int:
    """Explain a training that failed or runs badly, from its log (of any size and many ranks; - is
    standard input), the watch.jsonl of planner.watch, or a snapshot of torch's allocator.

    With --plan RUN, or MODEL and its setting, it compares what it saw with the prediction, and
    names the changes that free enough memory, with their predicted rates. Exit status 1 where
    nothing is recognised.
    """
    from planner.estimation.arguments import read_gpu
    from planner.estimation.estimate import default_precision
    from planner.watching.explaining.explanation import explain

    fields = {"source": source, **({"model": model} if model is not None else {}), **given}
    setting = None
    chosen: Any = model
    if model is not None:
        chosen, settings = model_and_settings(
            model, fields, {"precision": default_precision(read_gpu(given["gpu"]))}
        )
        if len(settings) > 1:
            raise UsageError("a training has one setting.", "Give one value to each option.")
        setting = settings[0]
    elif any(given_fields(fields, GRID_FIELDS)):
        raise UsageError("a setting needs a model.", "Name MODEL behind the log.")
    until = ", until its writer ends (Ctrl-C ends this)" if is_pipe(Path(source)) else ""
    with shows_seconds(f"Still reading {shorten(source)}{until}"):
        found = explain(
            source, chosen, setting, plan=given["plan"], gpu=given["gpu"],
            allocator=given["allocator"],
        )  # fmt: skip
    if given["as_json"]:
        print_json(found)
    else:
        from planner.report.explanation import explanation_text

        say(explanation_text(found))
    return 0 if found.findings or found.kind != "log" else 1
