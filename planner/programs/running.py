"""A command on an emulated machine, from its start until nothing of it is left; and the largest
batch of a program that fits, by running it with other values."""

import math
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

from planner.core.errors import PlannerError, UsageError, shorten
from planner.core.files import check_output
from planner.estimation.arguments import read_memory
from planner.estimation.largest import find_crossing
from planner.machine import supervisor
from planner.machine.emulated import EmulatedMachine, emulated_gpu, holding, started
from planner.machine.emulated.machine import EMULATED_GPU
from planner.programs import emulated, hook
from planner.programs.emulated import EmulatedRun
from planner.programs.snapshots import EMULATING, SNAPSHOT_ENDINGS

Hear = Callable[[int, int], None]
INTERRUPTED = 130  # the exit status of an interrupted program
LOOK_SECONDS = 0.5  # between two looks at how many steps the program has made
ENDING_SECONDS = 10.0  # from SIGTERM, or an interrupt, to SIGKILL


class InterruptedRun(KeyboardInterrupt):
    """A person interrupted the program; `run` is what it had needed until then."""

    def __init__(self, run: EmulatedRun) -> None:
        super().__init__()
        self.run = run


def emulate(
    command: Sequence[str] | Callable[[], object],
    *,
    gpu: str,
    gpus: int = 1,
    memory_bytes: int | str | None = None,
    in_use: int | str | None = None,
    steps: int = 0,
    snapshot: str | Path | None = None,
    stdout: int | IO[str] | None = None,
    hear: Hear | None = None,
) -> EmulatedRun:
    """Run `command` on emulated GPUs and say what it needs of them. It runs torch's own CUDA code,
    whose kernels compute nothing. Linux only.

    - `command`: a program and its arguments, or a function of a module that the program's Python
      can import.
    - `gpu`, `gpus`: which cards the machine has, and how many. `memory_bytes`: of each, where it is
      not the card's own; `in_use`: held by somebody else on the first. Both are bytes, or "3GiB".
    - `steps`: each process ends after so many steps of its optimizers (0: never).
    - `snapshot`: a file for the allocator's history at the peak; each rank writes its own.
    - `stdout`: where the program prints, as in `subprocess`.
    - `hear`: is called with the steps that all processes have made so far, and the most bytes that
      one used of a device.

    Raises UsageError for an unknown card, PlannerError where the emulated driver cannot be built.
    """
    if snapshot is not None:
        snapshot = check_output(snapshot, "a snapshot", SNAPSHOT_ENDINGS).absolute()
    words = _command_words(command)
    card = emulated_gpu(gpu)
    size = read_memory(memory_bytes) or card.memory_bytes
    in_use_bytes = read_memory(in_use or None) or 0
    card = replace(card, name=f"{card.name} (emulated)", memory_bytes=size)
    return _run(words, EmulatedMachine((card,) * gpus), in_use_bytes, steps, hear, snapshot, stdout)


def _run(
    words: list[str], machine: EmulatedMachine, in_use_bytes: int, steps: int, hear: Hear | None,
    snapshot: Path | None, stdout: int | IO[str] | None,
) -> EmulatedRun:  # fmt: skip
    with ExitStack() as stack:
        environment = stack.enter_context(started(machine))
        folder = Path(environment[EMULATED_GPU]).parent
        if in_use_bytes:
            stack.enter_context(holding(environment, in_use_bytes))
        records, site = folder / "records", folder / EMULATING.strip("/")
        records.mkdir()
        site.mkdir()
        shutil.copy(hook.__file__, site / "sitecustomize.py")
        paths = [str(site), *filter(None, [environment.get("PYTHONPATH")])]
        environment |= {
            "PYTHONPATH": os.pathsep.join(paths),
            hook.FOLDER: str(records),
            hook.STEPS: str(steps),
        }
        look = partial(_report_steps, records, hear)
        is_interrupted, status = False, INTERRUPTED
        try:
            status = supervised(words, stdout, environment=environment, folder=folder, look=look)
        except KeyboardInterrupt:
            is_interrupted = True
        is_recorded = (records / hook.LOADED).exists()
        try:
            processes = emulated.read_processes(records)
        except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
            raise PlannerError(
                f"what a process of the program wrote down is not whole ({shorten(str(error))}).",
                f"Does the program write into ${hook.FOLDER}? That folder is ours.",
            ) from None
        if snapshot is not None:
            emulated.keep_snapshots(records, processes, snapshot)
    first = machine.gpus[0]
    run = EmulatedRun(
        tuple(words), first.name, len(machine.gpus), status, in_use_bytes, processes,
        first.memory_bytes, first.context_bytes, is_recorded, is_interrupted=is_interrupted,
    )  # fmt: skip
    if is_interrupted:
        raise InterruptedRun(run)
    return run


def _command_words(command: Sequence[str] | Callable[[], object]) -> list[str]:
    if not callable(command):
        if isinstance(command, str) or not command:
            raise UsageError(
                f"a command is a program and its arguments, and {shorten(command)} is not.",
                "Write a list: ['python', 'train.py'].",
            )
        if shutil.which(command[0]) is None:
            is_script = command[0].endswith(".py")
            way_out = f"Write: -- python {command[0]}" if is_script else "Name one behind --."
            raise UsageError(f"{shorten(command[0])} is no program.", way_out)
        return list(command)
    module, name = command.__module__, command.__qualname__
    file = Path(command.__code__.co_filename).resolve()
    program = (
        f"import sys; sys.path.insert(0, {str(file.parents[module.count('.')])!r}); "
        f"import importlib; importlib.import_module({module!r}).{name}()"
    )
    return [sys.executable, "-P", "-c", program]


def supervised(
    command: Sequence[str], output: int | IO[Any] | None = None, *,
    environment: Mapping[str, str] | None = None, folder: Path | None = None,
    seconds: float = math.inf, look: Callable[[], None] = lambda: None,
) -> int:  # fmt: skip
    """Runs a command under a supervisor, and returns its exit status: 128 and the signal where a
    signal ended it. Whatever ends this process ends all that the command has started, and removes
    `folder`. `look` is called meanwhile, again and again. Raises TimeoutError after so many
    `seconds`, once nothing is left of the command."""
    lifeline, holder = os.pipe()
    reader, status = os.pipe()
    removed = [] if folder is None else ["--remove", str(folder)]
    arguments = [str(lifeline), str(status), *removed, *command]
    with subprocess.Popen(
        [sys.executable, "-S", "-E", supervisor.__file__, *arguments],
        env=environment, pass_fds=(lifeline, status), start_new_session=True, stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
    ) as process:  # fmt: skip
        os.close(lifeline)
        os.close(status)
        reports, deadline = b"", time.monotonic() + seconds
        try:
            is_over = False
            while not is_over:
                if select.select([reader], [], [], LOOK_SECONDS)[0]:
                    reports += (part := os.read(reader, 4096))
                    is_over = not part
                elif time.monotonic() > deadline:
                    raise TimeoutError
                look()
        except BaseException:
            _order(holder, b"T")
            end = time.monotonic() + ENDING_SECONDS  # or until the supervisor closes its end
            while (left := end - time.monotonic()) > 0:
                if select.select([reader], [], [], left)[0] and not os.read(reader, 4096):
                    break
            raise
        finally:
            _order(holder, b"D")
            os.close(holder)  # which ends what is left
            process.wait()
            os.close(reader)
    code = os.waitstatus_to_exitcode(int(reports.splitlines()[-1].split()[1]))
    return code if code >= 0 else 128 - code


def _report_steps(records: Path, hear: Hear | None) -> None:
    if hear is None:
        return
    ends = [steps[-1] for p in records.glob(f"*{hook.STEPPED}") if (steps := emulated.steps_of(p))]
    hear(
        min((step for step, *_ in ends), default=0), max((used for _, used, *_ in ends), default=0)
    )


def _order(holder: int, order: bytes) -> None:
    with suppress(BrokenPipeError):
        os.write(holder, order)


STEPS = 3  # the second is the first with an optimizer's state, the third settles the allocator
MAX_VALUE = 1 << 20
_SHOWN = 2000  # characters of the output of a program that failed


@dataclass(frozen=True)
class Variation:
    """The largest value of an argument with which a program fits, and how that was found.

    `largest` surely fits: without retries, and with room for the largest of CUDA's contexts; it is
    0 where no value does. `next_larger` does not: the smallest larger value that was tried. `runs`
    are all runs, by value. Where the program ended at `next_larger` for another reason than
    memory, no further value was tried, and `last_line` is its last line.
    """

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
    """Finds the largest value of `argument` (such as "--batch-size", which `command` holds with a
    value) with which the program makes its steps. `options` are those of `emulate`; `tell` is
    called after each run, `hear` with the value and what `emulate` tells its own. Raises UsageError
    where the command has no such argument, PlannerError where the first run ends for another reason
    than memory."""
    words, (place, before, first) = list(command), _find_argument(command, argument)
    runs: dict[int, EmulatedRun] = {}
    room = 1  # bytes that the last value which fits left

    @cache
    def spare_bytes(value: int) -> int:
        """The bytes that a value leaves. How many lack where it does not fit nobody knows: as many
        are assumed as were left before."""
        nonlocal room
        words[place] = f"{before}{value}"
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            run = runs[value] = emulate(
                words,
                **{"steps": STEPS, **options, "stdout": output},
                hear=partial(hear, value),
            )
            if run.fits_so_far is None or (run.fits_so_far and run.status):
                output.seek(0)
                raise PlannerError(
                    f"with {argument} {value} the program ended with status {run.status} and ran "
                    f"out of no memory. It said last:\n{output.read()[-_SHOWN:].rstrip()}",
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
            find_crossing(spare_bytes, value, 2 * value, min([MAX_VALUE, *runs.keys() - {value}]))
    except PlannerError as error:
        if len(runs) < 2:
            raise
        last_line = error.message.rpartition("\n")[2]
    largest = max((value for value, run in runs.items() if run.fits_surely), default=0)
    beyond = min((value for value in runs if value > largest), default=MAX_VALUE)
    return Variation(argument, largest, beyond, runs, last_line)


def _find_argument(command: Sequence[str], argument: str) -> tuple[int, str, int]:
    """The index of the word that holds the value, what stands before the value in it, and the
    value."""
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
