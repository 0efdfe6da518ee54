"""Whose time it was: each instant of the profiled steps belongs to one kind and one phase.

On a CPU an operation's own time is what no operation inside it takes. On a GPU kernels count, each
as the innermost operation that launched it, in the phase in which that was. What no kernel and no
computing operation takes is the host's: the device waits for it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from planner.core.errors import PlannerError
from planner.throughput.timeline import WAITING
from search.probe.protocol import PROFILE_MARK
from search.tuning.profiling.kinds import ON_HOST, OTHER, kernel_kind, operation_kind
from search.tuning.profiling.trace import Event, Trace

_NODE = "autograd::engine::evaluate_function"
_OPTIMIZER = "Optimizer.step#"


class Frame(NamedTuple):
    """An operation with what is known of it from those around it. `kind` is that of the innermost
    one that has any; `is_own` whether it is its own, and not only inherited for its kernels."""

    name: str
    kind: str | None
    is_own: bool
    in_node: bool
    in_optimizer: bool
    recomputes: bool


class Segment(NamedTuple):
    """A time in which `frame` was the innermost operation of a thread; `begins` is 1 in the first
    of its times, and else 0."""

    start: float
    end: float
    frame: Frame
    begins: int


class Work(NamedTuple):
    """Something that kept the device busy."""

    start: float
    end: float
    name: str
    kind: str
    phase: str
    recomputes: bool
    calls: int = 1


class Key(NamedTuple):
    phase: str
    kind: str
    recomputes: bool


@dataclass(frozen=True)
class Attribution:
    """Seconds over all profiled steps. `seconds` sum to `wall_seconds`; `names` are the seconds and
    the calls of each (name, kind). `unknown` are operations and kernels of no known kind."""

    num_steps: int
    wall_seconds: float
    seconds: dict[Key, float]
    names: dict[tuple[str, str], tuple[float, int]]
    unknown: tuple[str, ...]
    on_device: bool


def attribute(trace: Trace) -> Attribution:
    """Raises PlannerError for a trace without marked steps."""
    phases = _Phases(trace.marks)
    segments = {t: _segments(ops) for t, ops in _by_thread(trace.operations).items()}
    works = _on_device(trace, segments, phases) if trace.kernels else _on_host(segments, phases)
    return _account(works, phases, bool(trace.kernels))


class _Phases:
    """The marks of the steps: which phase an instant of the host's is in."""

    def __init__(self, marks: Sequence[Event]) -> None:
        if not marks:
            raise PlannerError("the trace holds no marked step.")
        self.starts = [mark.start for mark in marks]
        self.names = [mark.name.removeprefix(PROFILE_MARK) for mark in marks]
        self.start = marks[0].start
        self.end = max(mark.end for mark in marks)
        self.num_steps = max(1, self.names.count("optimizer"))

    def at(self, instant: float, frame: Frame | None = None) -> str:
        """An update that runs inside of backward belongs to the optimizer, as in a ledger."""
        name = self.names[max(0, bisect_right(self.starts, instant) - 1)]
        return "optimizer" if frame is not None and frame.in_optimizer else name


def _by_thread(events: Iterable[Event]) -> dict[str, list[Event]]:
    threads: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        threads[event.thread].append(event)
    return threads


def _segments(operations: Sequence[Event]) -> list[Segment]:
    """The innermost operation of one thread at each time, from its events in order."""
    found: list[Segment] = []
    stack: list[tuple[Event, Frame]] = []
    at, begins = 0.0, 0

    def until(instant: float) -> None:
        nonlocal at, begins
        if stack and instant > at:
            found.append(Segment(at, instant, stack[-1][1], begins))
            begins = 0
        at = max(at, instant)

    for event in operations:
        while stack and stack[-1][0].end <= event.start:
            until(stack[-1][0].end)
            stack.pop()
        until(event.start)
        begins = 1
        stack.append((event, _frame(event, stack[-1][1] if stack else None)))
    while stack:
        until(stack[-1][0].end)
        stack.pop()
    return found


def _frame(event: Event, around: Frame | None) -> Frame:
    kind = operation_kind(event.name)
    if kind is None and around is None:
        kind = OTHER
    inherited = around.kind if around is not None else None
    is_node = event.name.startswith(_NODE)
    in_node = is_node or (around is not None and around.in_node)
    recomputes = in_node and not is_node and event.records_grad
    recomputes = recomputes or (around is not None and around.recomputes and not is_node)
    is_update = event.name.startswith(_OPTIMIZER)
    return Frame(
        name=event.name,
        kind=inherited if kind in (None, ON_HOST) else kind,
        is_own=kind != ON_HOST,
        in_node=in_node,
        in_optimizer=is_update or (around is not None and around.in_optimizer),
        recomputes=recomputes,
    )


def _on_host(segments: dict[str, list[Segment]], phases: _Phases) -> list[Work]:
    """Operations that compute on the host itself; the rest of its time is not the device's."""
    return [
        Work(s.start, s.end, s.frame.name, s.frame.kind or OTHER, phases.at(s.start, s.frame),
             s.frame.recomputes, s.begins)
        for found in segments.values()
        for s in found
        if s.frame.is_own
    ]  # fmt: skip


def _on_device(trace: Trace, segments: dict[str, list[Segment]], phases: _Phases) -> list[Work]:
    """Kernels, each tied to its launch by the correlation, and to the operation around that."""
    launches = {launch.link: launch for launch in trace.launches if launch.link is not None}
    starts = {thread: [s.start for s in found] for thread, found in segments.items()}
    works = []
    for kernel in trace.kernels:
        launch = launches.get(kernel.link) if kernel.link is not None else None
        frame = None
        if launch is not None and launch.thread in starts:
            at = bisect_right(starts[launch.thread], launch.start) - 1
            if at >= 0 and segments[launch.thread][at].end >= launch.start:
                frame = segments[launch.thread][at].frame
        works.append(
            Work(
                kernel.start,
                kernel.end,
                kernel.name,
                kernel_kind(kernel.name, frame.kind if frame else None),
                phases.at(launch.start if launch else kernel.start, frame),
                frame.recomputes if frame else False,
            )
        )
    return works


def _account(works: list[Work], phases: _Phases, on_device: bool) -> Attribution:
    """Each instant once, to the work that began first; a gap to the phase of what it waited for."""
    seconds: dict[Key, float] = defaultdict(float)
    names: dict[tuple[str, str], tuple[float, int]] = {}
    at, last = phases.start, phases.names[0]
    for work in sorted(works):
        start, end = max(work.start, at), min(work.end, phases.end)
        if end <= start:
            continue
        seconds[Key(work.phase, WAITING, False)] += start - at
        seconds[Key(work.phase, work.kind, work.recomputes)] += end - start
        so_far, calls = names.get((work.name, work.kind), (0.0, 0))
        names[work.name, work.kind] = so_far + end - start, calls + work.calls
        at, last = end, work.phase
    seconds[Key(last, WAITING, False)] += phases.end - at
    return Attribution(
        num_steps=phases.num_steps,
        wall_seconds=phases.end - phases.start,
        seconds={key: s for key, s in seconds.items() if s > 0},
        names=names,
        unknown=tuple(sorted({name for name, kind in names if kind == OTHER})),
        on_device=on_device,
    )
