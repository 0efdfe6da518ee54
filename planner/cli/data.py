"""`planner data`: the fastest loader of some data on this machine, by short runs of real ones."""

from __future__ import annotations

import signal

import click

from planner.cli.arguments import read_duration
from planner.cli.command import Command
from planner.cli.output import print_json, say
from planner.cli.progress import quiet_flag
from planner.core.errors import UsageError, printable
from planner.core.schema.loading import MAX_WORKERS
from search import check_platform

_FEWEST = click.IntRange(1)


@click.command(
    cls=Command,
    examples=(
        "planner data pictures --batch-size 64",
        "planner data my_data:build --budget 30s --json",
    ),
)
@click.argument("data", metavar="DIR|MODULE:FACTORY")
@click.option("--batch-size", type=_FEWEST, default=64, show_default=True, help="Micro-batch.")
@click.option("--image-size", type=_FEWEST, default=224, show_default=True, help="In pixels.")
@click.option(
    "--pipeline", type=click.Choice(("torchvision", "timm")), default="torchvision",
    show_default=True, help="Whose transforms make tensors of pictures.",
)  # fmt: skip
@click.option(
    "--max-workers", type=click.IntRange(1, MAX_WORKERS), help="Default: twice the processors."
)
@click.option(
    "--device", metavar="DEVICE", default="auto", show_default=True, help="auto, cpu, cuda:0 …"
)
@click.option(
    "--budget", metavar="TIME", default="90s", show_default=True,
    help="Begin no further loader after this time.",
)  # fmt: skip
@quiet_flag
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    data: str, batch_size: int, image_size: int, pipeline: str, max_workers: int | None,
    device: str, budget: str, quiet: bool, as_json: bool,
) -> int:  # fmt: skip
    """Find how fast this machine feeds a training, and with which DataLoader.

    The data are a folder with a folder of pictures per class, or package.module:factory, which
    returns a Dataset. Nothing is written. Workers 0, 1, 2, 4 … are measured until two
    doublings gain less than 5%; Ctrl-C ends with the best so far.
    """
    check_platform()
    seconds = read_duration("--budget", budget)
    try:
        from search.loader import find_loader, loader_text
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UsageError(
            "a DataLoader is torch's, and torch is not installed.", "pip install torch"
        ) from None
    from search.loop.interrupts import handle_signals

    def show(line: str) -> None:
        if not quiet:
            click.echo(printable(line), err=True)

    with handle_signals(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as interrupts:
        found = find_loader(
            data, pipeline=pipeline, batch_size=batch_size,  # type: ignore[arg-type]
            image_size=(image_size, image_size), max_workers=max_workers, device=device,
            seconds=seconds, on_progress=show,
        )  # fmt: skip
        if as_json:
            print_json(found.model_dump(mode="json"))
        else:
            say(loader_text(found))
        return 0 if interrupts.number is None else interrupts.exit_status
