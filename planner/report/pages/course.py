"""A predicted step point by point: what is alive and reserved, what was asked for, by whom."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from planner.ledger.ledger import (
    Allocated,
    Category,
    Computed,
    Freed,
    Ledger,
    Marked,
    Scratch,
    Tagged,
)
from planner.machine.hardware.overheads import overheads_for
from planner.memory.caching_allocator import rounded
from planner.memory.profile import find_alive, walk_ledger
from planner.report.live import LiveBytes, step_allocator_bytes, step_live_bytes
from planner.report.pages.recomputation import Stretch, find_stretches
from planner.report.pages.step import Step


class Move(NamedTuple):
    """An allocation or a release: `num_bytes` is below 0 where it is one. `category` is what the
    bytes become, or were. `label` and `path` name the request that they serve, `during` and `at`
    the operation that ran last in the phase and its module, "" before the first; `stream` is that
    whose pool they are of, `storage` the number of what they belong to."""

    num_bytes: int
    category: Category
    label: str
    path: str
    during: str
    at: str
    stream: str
    storage: int


@dataclass(frozen=True)
class Course:
    """The steady step. Point 0 is the moment before it, each allocation and release makes one more:
    `moves[i]` leads to point i + 1.

    Bytes at each point: `allocated` in blocks, `reserved` from the driver, `reserved_of` the same
    by stream, `live_of` each stream in its pool. `stretches` are points of backward that are no
    backward. `micro_batches` are those of the phases, from 1, or 0 where there is only one.
    """

    live: LiveBytes
    moves: list[Move]
    allocated: list[int]
    reserved: list[int]
    reserved_of: dict[str, list[int]]
    live_of: dict[str, list[int]]
    stretches: list[Stretch]
    micro_batches: list[int]


def step_course(step: Step) -> Course:
    """The steady step of a subject, with what its device's allocator makes of it."""
    ledger = step.ledger
    live = step_live_bytes(ledger)
    workspace_bytes = overheads_for(step.gpu, ledger.environment).workspace_bytes
    played = step_allocator_bytes(ledger, live, workspace_bytes, step.allocator, step.may_reserve)
    streams = walk_ledger(ledger).stream_names
    moves = list(_moves(ledger, live))
    return Course(
        live=live,
        moves=moves,
        allocated=played.allocated_bytes,
        reserved=played.reserved_bytes,
        reserved_of={
            name: [by_stream[number] for by_stream in played.reserved_by_stream]
            for number, name in enumerate(streams)
        },
        live_of=_live_of(ledger, live, moves, streams),
        stretches=_stretches(ledger, live),
        micro_batches=_micro_batches(live),
    )


def _moves(ledger: Ledger, live: LiveBytes) -> Iterator[Move]:
    """What leads to each point but the first."""
    asked: dict[int, Allocated | Scratch] = {}
    categories: dict[int, Category] = {}
    wanted = set(live.events[1:])
    move: Move | None = None
    fresh = -1  # the storage that `move` allocates, whose tags may still come
    during = at = ""
    for index, event in enumerate(ledger.events):
        if type(event) is Computed:
            during, at = event.name, event.path
        elif type(event) is Marked:
            during = at = ""
        elif isinstance(event, Allocated | Scratch | Freed):
            if move is not None:
                yield move
            move, fresh, sign = None, event.storage, 1
            if not isinstance(event, Freed):
                asked[event.storage] = event
                categories[event.storage] = "temporaries"
                during, at = event.label, event.path
                of, category = event, categories[event.storage]
            else:
                of, category, sign = asked.pop(fresh), categories.pop(fresh), -1
            if index in wanted:
                size = sign * rounded(of.num_bytes)
                move = Move(size, category, of.label, of.path, during, at, of.stream, fresh)
        elif type(event) is Tagged and event.storage in categories:
            categories[event.storage] = event.category
            if event.storage == fresh and move is not None:
                move = move._replace(category=event.category)
    if move is not None:
        yield move


def _live_of(
    ledger: Ledger, live: LiveBytes, moves: list[Move], names: tuple[str, ...]
) -> dict[str, list[int]]:
    """What is alive of each stream's pool."""
    before = find_alive(ledger.events, live.events[0])
    return {
        name: list(
            accumulate(
                (move.num_bytes if move.stream == name else 0 for move in moves),
                initial=sum(rounded(of.num_bytes) for of, _ in before if of.stream == name),
            )
        )
        for name in names
    }


def _stretches(ledger: Ledger, live: LiveBytes) -> list[Stretch]:
    """As points: what is allocated and released from a stretch's first operation to its last."""
    marks = [event for event in ledger.events if type(event) is Marked]
    last = max(mark.step for mark in marks)
    stop = live.events[-1]
    places = [
        index
        for index in range(live.events[0] + 1, len(ledger.events))
        if type(ledger.events[index]) is Computed
    ]
    found = find_stretches(list(ledger.operations(last)))
    points = [
        Stretch(
            kind,
            bisect_left(live.events, places[first]),
            bisect_left(live.events, places[end] if end < len(places) else stop + 1),
        )
        for kind, first, end in found
    ]
    return [each for each in points if each.start < each.stop]


def _micro_batches(live: LiveBytes) -> list[int]:
    """Of each phase, counted from 1; 0 for what is of none, or where there is only one."""
    names = [phase.name for phase in live.phases]
    several = names.count("backward") > 1
    return [
        1 + names[:number].count("backward") if several and name in ("forward", "backward") else 0
        for number, name in enumerate(names)
    ]
