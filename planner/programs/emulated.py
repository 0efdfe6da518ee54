"""What the processes of an emulated program wrote down, read."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from shutil import copyfileobj
from typing import Any

from planner.core.files import opened_whole, read_pickle
from planner.core.units import format_bytes
from planner.machine.hardware.overheads import CONTEXT_BYTES_HIGH
from planner.programs import inside, snapshots

BACKWARD = "backward: gradients and temporaries"
NO_PYTHON = "autograd's own thread, where Python has no stack"
PHASES = {  # of a request, by what it is for
    "forward: activations": "forward", BACKWARD: "backward", "optimizer state": "optimizer",
}  # fmt: skip
ELSE = "else"
FEWEST_STEPS = 2
ABSURD = 100  # times the card: no program means to ask for so much
ENDLESS = 1_000_000  # steps that no training has: what lasts for so many lasts
EVEN, SLOWER = 0.3, 0.6  # what growth over the last third of steps has of that before, and at least
ALIVE, RESERVED = 2, 3  # columns of what a process wrote at the end of each step
Steps = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A device when a process had most of it, or ran out of it, in bytes. `step` counts the
    optimizer's, from 1; `phase` (forward, backward, optimizer, else), `module` ("" where it is not
    known) and `where`, a line, are those of the request that led to it; `groups` were alive."""

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
    """`outside_bytes` lie outside of torch's allocator: its context, and what other processes hold.
    `retries` counts how often the allocator had to empty its cache and ask again, which costs time
    on a real card."""

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
    """The first of torch's out-of-memory errors, of `times`; the program may have gone on from it.
    Before it steps had left `grown_bytes` more each (0: none). `forwards` of outermost modules had
    no backward yet. `is_expandable` says whether segments could grow."""

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
        """Whether its free pieces would have been enough, were they one."""
        enough = max(self.missing_bytes, self.reserved_bytes // 10)
        return self.unused_bytes >= enough and not (self.grown_bytes or self.is_expandable)

    @property
    def state_bytes(self) -> int:
        """That were alive, whatever the batch."""
        return self._alive("parameters and buffers", "optimizer state")

    @property
    def batch_bytes(self) -> int:
        """That were alive, and grow with the batch."""
        return self._alive("forward: activations", "batches")

    def _alive(self, *kinds: str) -> int:
        return sum(group.num_bytes for group in self.groups if group.category in kinds)


@dataclass(frozen=True)
class Growth:
    """What was alive at the end of step `to_step` and not at that of `from_step`."""

    from_step: int
    to_step: int
    groups: tuple[snapshots.Blocks, ...]

    @property
    def bytes_per_step(self) -> int:
        return sum(g.num_bytes for g in self.groups) // (self.to_step - self.from_step)


@dataclass(frozen=True)
class EmulatedProcess:
    """A process that initialised CUDA. `selects` says whether sizes of its tensors were values on
    the device, which nothing computed. `faults` are those of our own record of it. Each step left
    `grown_bytes` more alive, and reserved `grown_reserved_bytes` more (0: none). `is_trained` says
    whether a parameter of its optimizers ever had a gradient, `is_evaluated` whether a model ran
    without any, `is_cut` whether `--steps` ended it, `error` what did otherwise."""

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
        """The device of which it had most."""
        return max(self.peaks, key=lambda peak: peak.used_bytes, default=None)

    @property
    def used_bytes(self) -> int:
        return self.fullest.used_bytes if self.fullest else 0


@dataclass(frozen=True)
class EmulatedRun:
    """A command that ran on `gpus` emulated cards of one name, `in_use_bytes` of the first of which
    somebody else held. `status` is its exit status. Each card has `memory_bytes`, of which each
    process's CUDA context takes `context_bytes` (assumed). `is_recorded` says whether a Python of
    the program loaded what writes its record."""

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
        """The process that came nearest to what its device has."""
        return max(self.processes, key=lambda process: process.used_bytes, default=None)

    @property
    def out_of_memory(self) -> OutOfMemory | None:
        """The first that a process met."""
        return next((p.out_of_memory for p in self.processes if p.out_of_memory), None)

    @property
    def free_bytes(self) -> int:
        """Of the first card at the start: who holds some of it has a context there too."""
        return self.memory_bytes - (self.in_use_bytes and self.in_use_bytes + self.context_bytes)

    @property
    def lacks_context(self) -> bool:
        """Nothing ran on a card, as what is free of it is less than a context."""
        return self.free_bytes < self.context_bytes and not any(p.peaks for p in self.processes)

    @property
    def fits_so_far(self) -> bool | None:
        """As far as it ran. None where no process made two steps on a GPU (the second is the first
        that has an optimizer's state from its beginning), and where more was asked for than any
        program means to."""
        if self.out_of_memory is not None:
            return None if self.out_of_memory.is_absurd else False
        if self.lacks_context:
            return False
        is_known = any(p.steps >= FEWEST_STEPS for p in self.processes)
        return True if is_known else None

    @property
    def fits_surely(self) -> bool:
        """As far as it ran, without retries, and with room for the largest of CUDA's contexts."""
        peak = self.fullest.fullest if self.fullest else None
        has_room = peak is not None and peak.spare_bytes >= self.unsure_bytes
        return bool(self.fits_so_far and not self.retries and has_room)

    @property
    def unsure_bytes(self) -> int:
        """What a real CUDA context may take more."""
        return CONTEXT_BYTES_HIGH - self.context_bytes

    @property
    def fits(self) -> bool | None:
        """None too where something that was seen speaks against it."""
        return None if self.fits_so_far and self.doubts else self.fits_so_far

    @property
    def doubts(self) -> tuple[str, ...]:
        """What was seen that speaks against a step that fits being a training that does."""
        stepped = [p for p in self.processes if p.steps]
        found = []
        if any(not p.is_trained for p in stepped):
            found.append(
                "no parameter of an optimizer had a gradient in any step, so nothing was trained, "
                "and there was no optimizer state"
            )
        found += [text for left, text in self.grows if left < ENDLESS]
        if self.status and not self.is_interrupted:
            found.append(f"the program then ended with exit status {self.status}")
        return tuple(found)

    @property
    def grows(self) -> list[tuple[int, str]]:
        """For how many more steps there is room where memory grows most, and the sentence."""
        found = []
        for process in self.processes:
            live, reserved = process.grown_bytes, process.grown_reserved_bytes
            what, rate = ("live", live) if 2 * live >= reserved else ("reserved", reserved)
            if rate and process.fullest is not None:
                left = process.fullest.spare_bytes // rate
                said = f"{what} memory grows by {format_bytes(rate)} a step: if that goes on, "
                found.append((left, f"{said}it runs out after about {left:,} more"))
        return sorted(found)[:1]

    @property
    def is_cut(self) -> bool:
        return any(p.is_cut for p in self.processes)

    @property
    def error(self) -> str:
        """What a process ended by, the first of them."""
        return next((p.error for p in self.processes if p.error), "")

    @property
    def selects(self) -> bool:
        return any(process.selects for process in self.processes)

    @property
    def retries(self) -> int:
        return max((peak.retries for p in self.processes for peak in p.peaks), default=0)

    @property
    def steps(self) -> int:
        """That every process made which steps at all."""
        return min((p.steps for p in self.processes if p.steps), default=0)


def grown(steps: Steps, column: int = ALIVE) -> int:
    """Bytes a step by which what is held rises: evenly over the thirds of the steps since SETTLED,
    by their medians. What rose once, as an average's copy does, or ever less, as with pictures of
    random size, does not."""
    since = [(entry[0], entry[column]) for entry in steps if entry[0] >= inside.SETTLED]
    if len(since) < inside.LEAST_STEPS - inside.SETTLED:
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
    """What processes wrote into `folder`, by rank; those without one last."""
    found = (_process(path, json.loads(path.read_text())) for path in folder.glob("*.json"))
    return tuple(sorted(found, key=lambda p: (p.rank is None, p.rank or 0, p.pid)))


def steps_of(path: Path) -> list[list[int]]:
    """The lines of a process; the last may not be whole."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [list(map(int, line.split())) for line in lines]


def keep_snapshots(folder: Path, processes: Iterable[EmulatedProcess], path: Path) -> None:
    """Where each process ran out of memory, else at its last peak; of each rank its own file."""
    for process in processes:
        peaks = sorted(folder.glob(f"{process.pid}-peak*"), key=lambda at: at.stat().st_mtime_ns)
        found = [*peaks, *folder.glob(f"{process.pid}-{inside.OUT_OF_MEMORY}*")]
        rank = "" if process.rank is None else f"_rank{process.rank}"
        for last in found[-1:]:
            with opened_whole(last) as packed, path.with_stem(path.stem + rank).open("wb") as file:
                copyfileobj(packed, file)


def _snapshot(path: Path, moment: str) -> dict[str, Any]:
    """That the process of a record wrote at a moment."""
    file = path.with_name(f"{path.stem}-{moment}{inside.SNAPSHOT}")
    with opened_whole(file) as snapshot:
        return read_pickle(snapshot, file.name)


def _process(path: Path, record: dict[str, Any]) -> EmulatedProcess:
    names = "peaks", "out_of_memory", "grown_at", "faults"
    peaks, failed, grown_at, faults = (record.pop(name) for name in names)
    steps = steps_of(path.with_suffix(inside.STEPPED))
    more = grown(steps)
    return EmulatedProcess(
        **record, faults=tuple(faults),
        peaks=tuple(_peak(path, int(device), figures) for device, figures in peaks.items()),
        out_of_memory=_failed(path, failed, steps) if failed else None,
        growth=_growth(path, grown_at) if more and grown_at else None,
        grown_bytes=more, grown_reserved_bytes=grown(steps, RESERVED),
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
    return Growth(inside.SETTLED, step, tuple(group for group in more if group.num_bytes > 0))


def _peak(path: Path, device: int, figures: dict[str, Any]) -> DevicePeak:
    snapshot = _snapshot(path, f"peak{device}")
    return DevicePeak(
        **figures, device=device, **_placed(snapshot, *snapshots.alive_at_peak(snapshot, device))
    )


def _failed(path: Path, figures: dict[str, Any], steps: Steps) -> OutOfMemory:
    snapshot, device = _snapshot(path, inside.OUT_OF_MEMORY), figures["device"]
    request = [e for e in snapshot["device_traces"][device] if e["action"] == "oom"][-1]
    return OutOfMemory(
        **figures, grown_bytes=grown([line for line in steps if line[0] < figures["step"]]),
        is_expandable=any(segment.get("is_expandable") for segment in snapshot["segments"]),
        **_placed(snapshot, snapshots.alive_at_end(snapshot, device), request),
    )  # fmt: skip


def _placed(
    snapshot: Mapping[str, Any], alive: Iterable[snapshots.Entry], request: snapshots.Entry
) -> dict[str, Any]:
    """What was alive, and the module and the line of a request: of backward, where Python has no
    stack, the line that called it."""
    mark = request.get("user_metadata", "")
    known = ("", False, ())
    module, is_backward, caller = snapshot["marks"][int(mark)] if mark.isdigit() else known
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
    """All of the program's history is there: only autograd's thread has no stack."""
    return (BACKWARD, NO_PYTHON) if place[0] == snapshots.NO_STACK else place
