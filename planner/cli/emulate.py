"""`planner emulate`: a program of the user's own, unchanged, on an emulated GPU."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from typing import TYPE_CHECKING, Any

from planner.cli.options import TO_FILE, Json, argument, option, reads, refuse_if, switch
from planner.cli.show import answer, say, tell
from planner.core.schema.model import MAX_SIZE
from planner.core.terminal import has_live_terminal
from planner.core.units import format_bytes
from planner.machine.emulated.machine import MAX_GPUS
from search.loop.signals import handle_signals

if TYPE_CHECKING:
    from planner.programs.emulated import EmulatedRun

CARD, PROGRAM = "The card", "The program"  # headings of --help


class EmulateRequest(Json):
    """The request of `planner emulate`."""

    words: tuple[str, ...] = argument("COMMAND…")
    gpu: str = option("'planner gpus' lists cards.", "NAME", CARD, default=MISSING, values="gpus")
    gpus: int = option("How many such cards.", "N", CARD, default=1, bounds=(1, MAX_GPUS))
    memory: str | None = option("The card's memory, if not the catalogue's: 12GiB.", "SIZE", CARD)
    in_use: str | None = option("What other programs hold of it: 3GiB.", "SIZE", CARD)
    steps: int | None = option("End each process after N steps of its optimizer (3 with --vary).",
                               "N", PROGRAM, bounds=(2, MAX_SIZE))  # fmt: skip
    vary: str | None = option("Find the largest value of ARG that fits.", "ARG", PROGRAM)
    snapshot: str | None = option("Keep the allocator's history at the peak.", *TO_FILE)
    report: str | None = option("The answer as a page of HTML too.", *TO_FILE)
    progress: bool = switch("Also print steps where standard error is not a terminal.")


@reads(EmulateRequest, allow_interspersed_args=False)  # COMMAND's options are its own
def command(request: EmulateRequest) -> int:
    """Run COMMAND with emulated GPUs, and say what it needs of them: peaks, where they are, what
    is alive then, what grows from step to step, and whether it fits.

    torch's own CUDA code asks for the memory; kernels compute nothing. So losses are no results,
    and how long it takes says nothing of a GPU. It needs Linux, a C compiler, and torch's build
    for CUDA in the Python that COMMAND runs. No file of the program is changed and nothing is
    installed: for the run, PYTHONPATH begins with a folder of ours.
    Exit status: that of COMMAND, or 1 where it does not fit or that is not known.

    Examples:
      planner emulate --gpu "RTX 4090" --steps 3 -- python train.py --batch-size 64
      planner emulate --gpu "RTX 4090" --vary --batch-size -- python train.py --batch-size 64
      planner emulate --gpu a100-sxm-80gb --gpus 4 -- torchrun --nproc-per-node 4 train.py
    """
    from planner.programs.running import InterruptedRun, emulate
    from planner.report.pages import make_footer
    from planner.report.programs import emulated_page, emulation_text
    from search.runs import check_page, write_page

    is_shown = request.progress or has_live_terminal(os.environ)
    if request.report is not None:
        law = "--report is of one run, and --vary makes several."
        refuse_if(request.vary is not None, law, "Omit one of them.")
        check_page(request.report)
    card_fields = ("gpu", "gpus", "in_use", "snapshot")
    card_options = {name: getattr(request, name) for name in card_fields}
    card_options["memory_bytes"] = request.memory
    if request.vary is not None:
        return _vary(request, is_shown, card_options)
    on_step = _make_reporter(bool(request.steps)) if is_shown else None
    output = 2 if request.as_json else None

    def print_answer(run: EmulatedRun, before: str) -> None:
        answer(request, run, lambda: before + emulation_text(run))

    with handle_signals(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as interrupts:
        try:
            steps = request.steps or 0
            run = emulate(request.words, steps=steps, stdout=output, hear=on_step, **card_options)
        except InterruptedRun as interrupted:
            is_typed = interrupts.number == signal.SIGINT
            reason = "it was interrupted" if is_typed else interrupts.ending
            print_answer(interrupted.run, f"\nUntil {reason}:\n")
            return interrupts.exit_status
    print_answer(run, "\n")
    if request.report is not None:
        say(f"\nWrote {write_page(emulated_page(run, make_footer()), request.report)}.")
    return run.status if run.fits else run.status or 1


def _vary(request: EmulateRequest, is_shown: bool, card_options: Mapping[str, Any]) -> int:
    from rich.console import Console

    from planner.programs.running import vary
    from planner.report.programs import variation_text

    name, steps = str(request.vary), {"steps": request.steps} if request.steps else {}
    with Console(stderr=True, quiet=not is_shown).status(f"{name}: starting") as status:
        variation = vary(
            request.words, name, **steps, **card_options,
            tell=lambda n, r: tell(f"{name} {n}: {'fits' if r.fits_so_far else 'does not fit'}"),
            hear=lambda n, s, used: status.update(f"{name} {n}: step {s}, {format_bytes(used)}"),
        )  # fmt: skip
    answer(request, variation, lambda: variation_text(variation))
    return 0 if variation.largest and variation.runs[variation.largest].fits else 1


def _make_reporter(is_short: bool) -> Callable[[int, int], None]:
    """A function that prints steps: as lines, since the program writes to the same terminal, and
    ever fewer of them."""
    next_step, next_silence, started = 1, 10.0, time.monotonic()  # a line after 10 s without a step

    def hear(steps: int, used_bytes: int) -> None:
        nonlocal next_step, next_silence
        elapsed = time.monotonic() - started
        if steps >= next_step:
            tell(f"step {steps}: {format_bytes(used_bytes)} of the card at most")
            next_step = steps + 1 if steps < 3 else 2 * steps
            if steps == 6 and not is_short:
                tell("It runs to its end. Ctrl-C, or --steps 3, gives the answer so far.")
        elif elapsed >= next_silence and not steps:
            tell(f"no step yet after {elapsed:.0f} s")
            next_silence = 2 * elapsed

    return hear
