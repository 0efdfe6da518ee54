"""The largest batch of a program that fits: the same command, run with other values."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from planner.core.errors import PlannerError, UsageError, shorten
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
    value = _value(command, argument)
    runs: dict[int, EmulatedRun] = {}
    low, high = 0, MAX_VALUE
    while value := _next(low, high, value, runs):
        with tempfile.TemporaryFile("w+", errors="replace") as said:
            run = emulate(
                _with(command, argument, value),
                **{"steps": STEPS, **options, "output": said, "advised": False},
                hear=partial(hear, value),
            )
            runs[value] = run
            if run.fits_so_far is None or (run.fits_so_far and run.status):
                said.seek(0)
                text = said.read()[-_SHOWN:].rstrip()
                if len(runs) > 1:
                    return Variation(argument, low, value, runs, text.rpartition("\n")[2])
                raise PlannerError(
                    f"with {argument} {value} the program ended with status {run.status} and ran "
                    f"out of no memory. It said last:\n{text}",
                    "Run it by itself first, with 'planner emulate' and without --vary.",
                )
        tell(value, run)
        if run.lacks_context:
            break
        if run.fits_surely:
            low = max(low, value)
        elif value > low:
            high = value
    return Variation(argument, low, high, runs)


def _next(low: int, high: int, first: int, runs: dict[int, EmulatedRun]) -> int:
    """The first value; then up or down by twos until both sides are known; then where a line
    through the two largest that fit meets what they may take, or halfway; 0 is the end."""
    if not runs:
        return min(first, high - 1)
    if high - low == 1:
        return 0
    if high == MAX_VALUE:
        return min(2 * low, high - 1)
    if low == 0:
        return high // 2
    halfway = (low + high) // 2
    fitting = sorted(value for value, run in runs.items() if run.fits_surely)[-2:]
    if len(fitting) < 2 or len(runs) % 2:
        return halfway
    (a, one), (b, other) = ((v, runs[v].fullest) for v in fitting)
    assert one is not None
    assert other is not None
    slope = (other.used_bytes - one.used_bytes) / (b - a)
    if slope <= 0:
        return halfway
    spare = min(peak.spare_bytes for peak in other.peaks) - runs[b].unsure_bytes
    return min(max(b + int(spare / slope), low + 1), high - 1)


def _place(command: Sequence[str], argument: str) -> tuple[int, str]:
    """Where the argument is, and what stands between it and its value."""
    found = [(i, glue) for i, w in enumerate(command) if (glue := _glue(w, argument)) is not None]
    if not found or "=" in argument:
        way_out = f"Write it there with a value: -- python train.py {argument} 64"
        near = next((word for word in command if argument and word.lstrip("-") == argument), None)
        way_out = f"Write --vary {near}." if near else way_out
        raise UsageError(f"the command has no {shorten(argument)}.", way_out)
    return found[-1]


def _glue(word: str, argument: str) -> str | None:
    """ " " where the value is the next word, "=", "" as in `-b8`, None where it is another word."""
    if word == argument:
        return " "
    if word.startswith(f"{argument}="):
        return "="
    is_short = len(argument) == 2 and argument.startswith("-")
    return "" if is_short and word.startswith(argument) and word[2:].isdigit() else None


def _value(command: Sequence[str], argument: str) -> int:
    index, glue = _place(command, argument)
    following = "".join(command[index + 1 : index + 2])
    word = following if glue == " " else command[index][len(argument + glue) :]
    if not word.isdigit() or not int(word):
        raise UsageError(
            f"{argument} is {shorten(word)} in the command: a whole number above 0 is varied.",
            f"Write one behind it: -- python train.py {argument} 64",
        )
    return int(word)


def _with(command: Sequence[str], argument: str, value: int) -> list[str]:
    words, (index, glue) = list(command), _place(command, argument)
    if glue == " ":
        words[index + 1] = str(value)
    else:
        words[index] = f"{argument}{glue}{value}"
    return words
