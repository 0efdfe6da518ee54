"""`planner emulate`: a program of the user's own, unchanged, on a GPU that is not there."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import click

from planner.cli.command import Command
from planner.cli.output import print_json, say
from planner.core.errors import UsageError
from planner.core.terminal import has_live_terminal
from planner.core.units import format_bytes
from planner.machine.emulated.machine import MAX_GPUS
from search.loop.interrupts import handle_signals

STDERR = 2
MAX_NODES = 16
SILENT_SECONDS = 10.0  # without a step until a word says so, and then ever longer


@click.command(
    cls=Command,
    context_settings={"allow_interspersed_args": False},  # COMMAND's options are its own
    headings={
        "The card": ("gpu", "gpus", "nodes", "memory", "in_use"),
        "The program": ("steps", "argument"),
    },
    examples=(
        'planner emulate --gpu "RTX 4090" --steps 3 -- python train.py --batch-size 64',
        'planner emulate --gpu "RTX 4090" --vary --batch-size -- python train.py --batch-size 64',
        "planner emulate --gpu a100-sxm-80gb --gpus 4 -- torchrun --nproc-per-node 4 train.py",
    ),
)
@click.argument("words", nargs=-1, required=True, metavar="COMMAND…")
@click.option("--gpu", required=True, metavar="NAME", help="The card, of 'planner gpus'.")
@click.option(
    "--gpus", type=click.IntRange(1, MAX_GPUS), default=1, show_default=True, metavar="N",
    help="How many such cards.",
)  # fmt: skip
@click.option(
    "--nodes", type=click.IntRange(1, MAX_NODES), default=1, show_default=True, metavar="N",
    help="Run COMMAND once on each of N nodes, each with such cards, as ranks of one training.",
)  # fmt: skip
@click.option("--memory", metavar="SIZE", help="The card's memory, if not the catalogue's: 12GiB.")
@click.option("--in-use", metavar="SIZE", help="What other programs hold of it: 3GiB.")
@click.option(
    "--steps", metavar="N", type=click.IntRange(min=2),
    help="End each process after N steps of its optimizer (3 with --vary).",
)  # fmt: skip
@click.option("--vary", "argument", metavar="ARG", help="Find the largest value of ARG that fits.")
@click.option("--snapshot", metavar="FILE", help="Keep the allocator's history at the peak.")
@click.option("--report", metavar="FILE", help="The answer as a page of HTML too.")
@click.option(
    "--progress", is_flag=True, help="Say steps on standard error too where that is no terminal."
)
@click.option("--json", "as_json", is_flag=True, help="One object.")
def command(words: tuple[str, ...], argument: str | None, **given: Any) -> int:
    """Run COMMAND with emulated GPUs, and say what it needs of them: peaks, where they are, what
    is alive then, what grows from step to step, and whether it fits.

    torch's own CUDA code asks for the memory; kernels compute nothing. So losses are no results,
    and how long it takes says nothing of a GPU. It needs Linux, a C compiler, and torch's build
    for CUDA in the Python that COMMAND runs. No file of the program is changed and nothing is
    installed: for the run, PYTHONPATH begins with a folder of ours.
    Exit status: that of COMMAND, or 1 where it does not fit, or that could not be told.
    """
    from planner.report.emulation import emulated_page, emulation_text, variation_text
    from planner.report.pages import made_now
    from planner.watching.emulating.running import InterruptedRun, emulate
    from planner.watching.emulating.varying import vary
    from search.runs.writing import check_page, write_page

    as_json, steps, report = given.pop("as_json"), given.pop("steps"), given.pop("report")
    is_shown = given.pop("progress") or has_live_terminal(os.environ)
    if report is not None:
        if argument is not None:
            raise UsageError("--report is of one run, and --vary makes several.", "Omit one.")
        check_page(report)
    if argument is not None:
        options = {"steps": steps} if steps else {}

        def tell(value: int, run: Any) -> None:
            answer = "fits" if run.fits_so_far else "does not fit"
            click.echo(f"{argument} {value}: {answer}", err=True)

        from rich.console import Console

        with Console(stderr=True, quiet=not is_shown).status(f"{argument}: starting") as status:

            def show(value: int, steps: int, used_bytes: int) -> None:
                status.update(f"{argument} {value}: step {steps}, {format_bytes(used_bytes)}")

            varied = vary(words, argument, tell=tell, hear=show, **options, **given)
        print_json(varied) if as_json else say(variation_text(varied))
        return 0 if varied.largest and varied.runs[varied.largest].fits else 1
    hear, output = _saying() if is_shown else None, STDERR if as_json else None
    with handle_signals(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as interrupts:
        try:
            run = emulate(
                words, steps=steps or 0, output=output, hear=hear,
                tell=lambda line: click.echo(line, err=True), **given,
            )  # fmt: skip
        except InterruptedRun as interrupted:
            run, until = interrupted.run, f"Until {interrupts.ending}"
            until = "Until it was interrupted" if interrupts.number == signal.SIGINT else until
            print_json(run) if as_json else say(f"\n{until}:\n{emulation_text(run)}")
            return interrupts.exit_status
    print_json(run) if as_json else say(f"\n{emulation_text(run)}")
    if report is not None:
        say(f"\nWrote {write_page(emulated_page(run, made_now()), report)}.")
    return run.status if run.fits else run.status or 1


def _saying() -> Callable[[int, int], None]:
    """Lines, as the program writes to the same terminal, ever fewer of them."""
    due, silent, began = 1, SILENT_SECONDS, time.monotonic()

    def hear(steps: int, used_bytes: int) -> None:
        nonlocal due, silent
        passed = time.monotonic() - began
        if steps >= due:
            click.echo(f"step {steps}: {format_bytes(used_bytes)} of the card at most", err=True)
            due = steps + 1 if steps < 3 else 2 * steps
        elif passed >= silent and not steps:
            click.echo(f"no step yet after {passed:.0f} s", err=True)
        else:
            return
        silent = 2 * max(passed, SILENT_SECONDS / 2)

    return hear
