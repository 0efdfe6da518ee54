"""An emulated run: what the processes of the program wrote down (`hook.py`), read and judged."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from planner.core.files import opened_whole, write_output
from planner.core.units import format_bytes
from planner.machine.hardware.overheads import CONTEXT_BYTES_HIGH
from planner.programs import hook, snapshots

BACKWARD = "backward: gradients and temporaries"
NO_PYTHON = "autograd's own thread, where Python has no stack"
PHASES = {  # of a request, by what it is for
    "forward: activations": "forward", BACKWARD: "backward", "optimizer state": "optimizer",
}  # fmt: skip
ELSE = "else"
FEWEST_STEPS = 2
ABSURD = 100  # times the card: no program means to ask for so much
ENDLESS = 1_000_000  # steps that no training has: what lasts for so many lasts
# Growth is even where neither third of the steps has less than such a share of the other's.
EVEN, SLOWER = 0.3, 0.6
ALIVE, RESERVED = 2, 3  # columns of what a process wrote at the end of each step
Steps = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A device at the moment when a process had most of it, or ran out of it; sizes in bytes.

    `step` counts the optimizer's, from 1. `phase` (forward, backward, optimizer, else), `module`
    ("" where it is not known) and the line `where` belong to the request that led to the moment;
    `groups` were alive."""

    device: int
    total_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    step: int
    phase: str
    module: str
    where: str
    groups: tuple[snapshots.Blocks, ...]


@dataclass(frozen=True, kw_only=True)
class DevicePeak(Moment):
    """The moment when a process had most of a device. `outside_bytes` lie outside of torch's
    allocator: the CUDA context, and what other processes hold. `retries` counts how often the
    allocator had to empty its cache and ask again, which costs time on a real card."""

    name: str
    outside_bytes: int
    retries: int

    @property
    def used_bytes(self) -> int:
        return self.reserved_bytes + self.outside_bytes

    @property
    def spare_bytes(self) -> int:
        return self.total_bytes - self.used_bytes


@dataclass(frozen=True, kw_only=True)
class OutOfMemory(Moment):
    """The first of torch's `times` out-of-memory errors; the program may have gone on after it.
    Each step before it had left `grown_bytes` more (0: none). So many `forwards` of outermost
    modules had had no backward yet. `is_expandable`: segments could grow."""

    times: int
    requested_bytes: int
    free_bytes: int
    grown_bytes: int
    forwards: int
    is_expandable: bool = False

    @property
    def missing_bytes(self) -> int:
        return max(self.requested_bytes - self.free_bytes, 1)

    @property
    def unused_bytes(self) -> int:
        return self.reserved_bytes - self.allocated_bytes

    @property
    def is_absurd(self) -> bool:
        return self.requested_bytes > ABSURD * self.total_bytes

    @property
    def is_fragmented(self) -> bool:
        """Whether the allocator's free pieces would have been enough, were they one."""
        enough = max(self.missing_bytes, self.reserved_bytes // 10)
        return self.unused_bytes >= enough and not (self.grown_bytes or self.is_expandable)

    @property
    def state_bytes(self) -> int:
        """The bytes alive that do not depend on the batch."""
        return self._alive_bytes("parameters and buffers", "optimizer state")

    @property
    def batch_bytes(self) -> int:
        """The bytes alive that grow with the batch."""
        return self._alive_bytes("forward: activations", "batches")

    def _alive_bytes(self, *kinds: str) -> int:
        return sum(group.num_bytes for group in self.groups if group.category in kinds)


@dataclass(frozen=True)
class Growth:
    """What was alive at the end of step `to_step`, and was not at the end of step `from_step`."""

    from_step: int
    to_step: int
    groups: tuple[snapshots.Blocks, ...]

    @property
    def bytes_per_step(self) -> int:
        return sum(g.num_bytes for g in self.groups) // (self.to_step - self.from_step)


@dataclass(frozen=True)
class EmulatedProcess:
    """A process that initialised CUDA.

    - `selects`: sizes of its tensors were values on the device, which nothing computed.
    - `faults`: of our own code in the process.
    - `grown_bytes`, `grown_reserved_bytes`: what each step added to the live and to the reserved
      bytes (0: nothing).
    - `is_trained`: a parameter of its optimizers had a gradient.
    - `is_evaluated`: a model ran without gradients.
    - `is_cut`: `--steps` ended it; `error`: what ended it otherwise.
    """

    pid: int
    rank: int | None
    steps: int
    peaks: tuple[DevicePeak, ...]
    out_of_memory: OutOfMemory | None
    growth: Growth | None
    selects: bool
    faults: tuple[str, ...]
    grown_bytes: int = 0
    grown_reserved_bytes: int = 0
    is_trained: bool = True
    is_evaluated: bool = False
    is_cut: bool = False
    error: str = ""

    @property
    def fullest(self) -> DevicePeak | None:
        """The device of which the process had most."""
        return max(self.peaks, key=lambda peak: peak.used_bytes, default=None)

    @property
    def used_bytes(self) -> int:
        return self.fullest.used_bytes if self.fullest else 0


@dataclass(frozen=True)
class EmulatedRun:
    """A command that ran on emulated cards: `gpus` cards of one name.

    `status` is its exit status. Each card has `memory_bytes`; somebody else held `in_use_bytes` of
    the first, and the CUDA context of each process takes `context_bytes` (assumed). `is_recorded`:
    a Python of the program loaded what writes its record."""

    emulated = True
    computed = ("emulated", "fits", "fits_so_far", "doubts", "is_cut", "steps")
    command: tuple[str, ...]
    gpu: str
    gpus: int
    status: int
    in_use_bytes: int
    processes: tuple[EmulatedProcess, ...]
    memory_bytes: int = 0
    context_bytes: int = 0
    is_recorded: bool = True
    is_interrupted: bool = False

    @property
    def fullest(self) -> EmulatedProcess | None:
        """The process that used most of a device."""
        return max(self.processes, key=lambda process: process.used_bytes, default=None)

    @property
    def out_of_memory(self) -> OutOfMemory | None:
        """The first process's out-of-memory error, if any process met one."""
        return next((p.out_of_memory for p in self.processes if p.out_of_memory), None)

    @property
    def free_bytes(self) -> int:
        """What is free of the first card at the start. Whoever holds some of it has a context there
        too."""
        return self.memory_bytes - (self.in_use_bytes and self.in_use_bytes + self.context_bytes)

    @property
    def lacks_context(self) -> bool:
        """Whether nothing ran on a card because less than a CUDA context is free there."""
        return self.free_bytes < self.context_bytes and not any(p.peaks for p in self.processes)

    @property
    def fits_so_far(self) -> bool | None:
        """Whether the program fits as far as it ran. None where no process made two steps on a GPU
        (the second is the first that begins with an optimizer's state), and where it asked for more
        than any program means to."""
        if self.out_of_memory is not None:
            return None if self.out_of_memory.is_absurd else False
        if self.lacks_context:
            return False
        is_known = any(p.steps >= FEWEST_STEPS for p in self.processes)
        return True if is_known else None

    @property
    def fits_surely(self) -> bool:
        """Whether it fits as far as it ran, without retries, and with room for the largest CUDA
        context."""
        peak = self.fullest.fullest if self.fullest else None
        has_room = peak is not None and peak.spare_bytes >= self.unsure_bytes
        return bool(self.fits_so_far and not self.retries and has_room)

    @property
    def unsure_bytes(self) -> int:
        """The bytes that a real CUDA context may take beyond the assumed ones."""
        return CONTEXT_BYTES_HIGH - self.context_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the training fits. None also where there are `doubts`."""
        return None if self.fits_so_far and self.doubts else self.fits_so_far

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why a training may not fit although its steps did."""
        stepped = [p for p in self.processes if p.steps]
        doubts = []
        if any(not p.is_trained for p in stepped):
            doubts.append(
                "no parameter of an optimizer had a gradient in any step, so nothing was trained, "
                "and there was no optimizer state"
            )
        doubts += [text for left, text in self.grows if left < ENDLESS]
        if self.status and not self.is_interrupted:
            doubts.append(f"the program then ended with exit status {self.status}")
        return tuple(doubts)

    @property
    def grows(self) -> list[tuple[int, str]]:
        """Where memory grows most, if it grows: for how many more steps there is room, and a
        sentence that says so."""
        rows = []
        for process in self.processes:
            live, reserved = process.grown_bytes, process.grown_reserved_bytes
            what, rate = ("live", live) if 2 * live >= reserved else ("reserved", reserved)
            if rate and process.fullest is not None:
                left = process.fullest.spare_bytes // rate
                text = f"{what} memory grows by {format_bytes(rate)} a step: if that goes on, "
                rows.append((left, f"{text}it runs out after about {left:,} more"))
        return sorted(rows)[:1]

    @property
    def is_cut(self) -> bool:
        return any(p.is_cut for p in self.processes)

    @property
    def error(self) -> str:
        """The error that ended a process; the first one's."""
        return next((p.error for p in self.processes if p.error), "")

    @property
    def selects(self) -> bool:
        return any(process.selects for process in self.processes)

    @property
    def retries(self) -> int:
        return max((peak.retries for p in self.processes for peak in p.peaks), default=0)

    @property
    def steps(self) -> int:
        """The fewest steps of a process that made any."""
        return min((p.steps for p in self.processes if p.steps), default=0)


def growth_rate(steps: Steps, column: int = ALIVE) -> int:
    """The bytes by which a column rises each step; 0 unless it rises evenly over the thirds of the
    steps since SETTLED, by their medians. A column that rose once, as with the copy of an average,
    or that rises ever less, as with pictures of random size, does not."""
    since = [(entry[0], entry[column]) for entry in steps if entry[0] >= hook.SETTLED_STEP]
    if len(since) < hook.MIN_GROWTH_STEPS - hook.SETTLED_STEP:
        return 0
    cuts = [len(since) * third // 3 for third in range(4)]
    parts = [since[begin:end] for begin, end in pairwise(cuts)]
    middle = [
        (part[(len(part) - 1) // 2][0], sorted(size for _, size in part)[(len(part) - 1) // 2])
        for part in parts
    ]
    first, second = ((d - b) / (c - a) for (a, b), (c, d) in pairwise(middle))
    if not (first > 0 and second >= SLOWER * first and first >= EVEN * second):
        return 0
    return max((middle[2][1] - middle[0][1]) // (middle[2][0] - middle[0][0]), 1)


def read_processes(folder: Path) -> tuple[EmulatedProcess, ...]:
    """The processes that wrote into `folder`, by rank; those without a rank last."""
    records = (_process(path, json.loads(path.read_text())) for path in folder.glob("*.json"))
    return tuple(sorted(records, key=lambda p: (p.rank is None, p.rank or 0, p.pid)))


def steps_of(path: Path) -> list[list[int]]:
    """The columns of each whole line that a process wrote at the end of a step."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [list(map(int, line.split())) for line in lines]


def keep_snapshots(folder: Path, processes: Iterable[EmulatedProcess], path: Path) -> None:
    """Copies the snapshot of each process, where it ran out of memory or else at its last peak, to
    `path`; each rank has its own file. Raises PlannerError where it cannot be written."""
    for process in processes:
        peaks = sorted(folder.glob(f"{process.pid}-peak*"), key=lambda at: at.stat().st_mtime_ns)
        taken = [*peaks, *folder.glob(f"{process.pid}-{hook.OUT_OF_MEMORY}*")]
        rank = "" if process.rank is None else f"_rank{process.rank}"
        for last in taken[-1:]:
            with opened_whole(last) as packed:
                write_output(path.with_stem(path.stem + rank), packed.read())


def _snapshot(path: Path, moment: str) -> dict[str, Any]:
    """The snapshot that the process of a record wrote at a moment."""
    file = path.with_name(f"{path.stem}-{moment}{hook.SNAPSHOT}")
    with opened_whole(file) as snapshot:
        return snapshots.read_pickle(snapshot, file.name)


def _process(path: Path, record: dict[str, Any]) -> EmulatedProcess:
    names = "peaks", "out_of_memory", "grown_at", "faults"
    peaks, failed, grown_at, faults = (record.pop(name) for name in names)
    steps = steps_of(path.with_suffix(hook.STEPPED))
    more = growth_rate(steps)
    return EmulatedProcess(
        **record, faults=tuple(faults),
        peaks=tuple(_peak(path, int(device), figures) for device, figures in peaks.items()),
        out_of_memory=_failed(path, failed, steps) if failed else None,
        growth=_growth(path, grown_at) if more and grown_at else None,
        grown_bytes=more, grown_reserved_bytes=growth_rate(steps, RESERVED),
    )  # fmt: skip


def _growth(path: Path, step: int) -> Growth:
    before, now = (
        _groups(snapshots.alive_at_end(_snapshot(path, name))) for name in ("settled", "grown")
    )
    settled = {(group.category, group.where): group.num_bytes for group in before}
    more = [
        replace(group, num_bytes=group.num_bytes - settled.get((group.category, group.where), 0))
        for group in now
    ]
    return Growth(hook.SETTLED_STEP, step, tuple(group for group in more if group.num_bytes > 0))


def _peak(path: Path, device: int, figures: dict[str, Any]) -> DevicePeak:
    snapshot = _snapshot(path, f"peak{device}")
    moment = _moment(snapshot, *snapshots.alive_at_peak(snapshot, device))
    return DevicePeak(**figures, device=device, **moment)


def _failed(path: Path, figures: dict[str, Any], steps: Steps) -> OutOfMemory:
    snapshot, device = _snapshot(path, hook.OUT_OF_MEMORY), figures["device"]
    request = [e for e in snapshot["device_traces"][device] if e["action"] == "oom"][-1]
    return OutOfMemory(
        **figures, grown_bytes=growth_rate([line for line in steps if line[0] < figures["step"]]),
        is_expandable=any(segment.get("is_expandable") for segment in snapshot["segments"]),
        **_moment(snapshot, snapshots.alive_at_end(snapshot, device), request),
    )  # fmt: skip


def _moment(
    snapshot: Mapping[str, Any], alive: Iterable[snapshots.Entry], request: snapshots.Entry
) -> dict[str, Any]:
    """The module, the phase and the line of a request, and what was alive. Backward has no Python
    stack: its line is the one that called backward."""
    mark = request.get("user_metadata", "")
    unknown = ("", False, ())
    module, is_backward, caller = snapshot["marks"][int(mark)] if mark.isdigit() else unknown
    stack = snapshots.stack_of(request) or snapshots.python_frames(caller)
    category, where = _in_backward(snapshots.place_of(stack))
    if theirs := [frame for frame in stack if "/site-packages/" not in frame[0]]:
        where = snapshots.place_of(theirs)[1]
    phase = "backward" if is_backward else PHASES.get(category, ELSE)
    return {"module": module, "phase": phase, "where": where, "groups": _groups(alive)}


def _groups(alive: Iterable[snapshots.Entry]) -> tuple[snapshots.Blocks, ...]:
    return tuple(
        snapshots.Blocks(*_in_backward((g.category, g.where)), g.num_bytes, g.count)
        for g in snapshots.grouped(alive)
    )


def _in_backward(place: tuple[str, str]) -> tuple[str, str]:
    """A place, named after backward where it has no stack: the whole history of the program is
    there, and only autograd's thread has none."""
    return (BACKWARD, NO_PYTHON) if place[0] == snapshots.NO_STACK else place
