"""The largest batch of a program that fits: the same command, run with other values."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from planner.core.errors import PlannerError, UsageError, shorten
from planner.estimation.largest import sought
from planner.watching.emulating.reading import EmulatedRun
from planner.watching.emulating.running import emulate

STEPS = 3  # the second is the first with an optimizer's state, the third settles the allocator
MAX_VALUE = 1 << 20
_SHOWN = 2000  # characters of what a program said that failed


@dataclass(frozen=True)
class Variation:
    """`largest` surely fits: without retries, and with room for the largest of CUDA's contexts.
    `next_larger`, the least that was tried beyond, does not; 0 where none does. `runs` are all that
    were made, by value. Where the program ended at `next_larger` for another reason than memory, no
    further value was tried, and `last_line` is what it said last."""

    argument: str
    largest: int
    next_larger: int
    runs: dict[int, EmulatedRun]
    last_line: str | None = None


def vary(
    command: Sequence[str],
    argument: str,
    *,
    tell: Callable[[int, EmulatedRun], None] = lambda *_: None,
    hear: Callable[[int, int, int], None] = lambda *_: None,
    **options: Any,
) -> Variation:
    """The largest value of `argument` (such as "--batch-size", which `command` holds with a value)
    with which the program makes its steps. `options` are those of `emulate`; `tell` hears of each
    run, `hear` of each value's steps as that of `emulate`. Raises UsageError where the command has
    no such argument, PlannerError where the first run ends for another reason than memory."""
    words, (place, before, first) = list(command), _found(command, argument)
    runs: dict[int, EmulatedRun] = {}
    room = 1  # that the largest left which fits

    @cache
    def spare_bytes(value: int) -> int:
        """Of a value that does not fit nobody knows: as much too little as there was before."""
        nonlocal room
        words[place] = f"{before}{value}"
        with tempfile.TemporaryFile("w+", errors="replace") as said:
            run = runs[value] = emulate(
                words,
                **{"steps": STEPS, **options, "output": said, "advised": False},
                hear=partial(hear, value),
            )
            if run.fits_so_far is None or (run.fits_so_far and run.status):
                said.seek(0)
                raise PlannerError(
                    f"with {argument} {value} the program ended with status {run.status} and ran "
                    f"out of no memory. It said last:\n{said.read()[-_SHOWN:].rstrip()}",
                    "Run it by itself first, with 'planner emulate' and without --vary.",
                )
        tell(value, run)
        if run.fits_surely and run.fullest:
            room = max(min(p.spare_bytes for p in run.fullest.peaks) - run.unsure_bytes, 1)
        return room if run.fits_surely else -room

    value, last_line = min(first, MAX_VALUE - 1), None
    try:
        while value and spare_bytes(value) < 0:
            value = 0 if runs[value].lacks_context else value // 2
        if value:
            sought(spare_bytes, value, 2 * value, min([MAX_VALUE, *runs.keys() - {value}]))
    except PlannerError as error:
        if len(runs) < 2:
            raise
        last_line = error.message.rpartition("\n")[2]
    largest = max((value for value, run in runs.items() if run.fits_surely), default=0)
    beyond = min((value for value in runs if value > largest), default=MAX_VALUE)
    return Variation(argument, largest, beyond, runs, last_line)


def _found(command: Sequence[str], argument: str) -> tuple[int, str, int]:
    """Which word has the value, what stands before it there, and the value."""
    is_short = len(argument) == 2 and argument.startswith("-")
    for index, word in [] if "=" in argument else [*enumerate(command)][::-1]:
        place, before = index, ""
        if word == argument:
            place = index + 1
        elif word.startswith(f"{argument}="):
            before = f"{argument}="
        elif is_short and word.startswith(argument) and word[2:].isdigit():
            before = argument
        else:
            continue
        value = "".join(command[place : place + 1]).removeprefix(before)
        if not value.isdigit() or not int(value):
            raise UsageError(
                f"{argument} is {shorten(value)} in the command: a whole number above 0 is varied.",
                f"Write one behind it: -- python train.py {argument} 64",
            )
        return place, before, int(value)
    near = next((word for word in command if argument and word.lstrip("-") == argument), None)
    way_out = f"Write it there with a value: -- python train.py {argument} 64"
    raise UsageError(
        f"the command has no {shorten(argument)}.", f"Write --vary {near}." if near else way_out
    )
