"""How others search, to compare with: walks, which yield a candidate and are sent its record."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from random import Random
from typing import Generic

from planner.core.schema import MeasurementRecord, TrainSetting
from search.loop.space import Candidate, Space
from search.loop.strategies.in_order import ListStrategy
from search.loop.strategies.plain_default import arm_candidates
from search.loop.strategies.strategy import Choice, Situation, Strategy
from search.loop.surrogate.prior import Prior
from search.probe.evidence import is_feasible
from search.probe.kinds import RecordT, SettingT

BATCHES_PER_ARM = 3  # of the bounded grid
Walk = Generator[Candidate[SettingT], RecordT, None]


class WalkStrategy(Generic[SettingT, RecordT]):
    """A walk as a strategy. What is already measured is sent to the walk without a probe."""

    def __init__(self, walk: Walk[SettingT, RecordT]) -> None:
        self.walk = walk
        self.known: dict[str, RecordT] = {}
        self.wanted: Candidate[SettingT] | None = None
        self.started = False
        self.stopped_because = ""

    def tell(self, candidate: Candidate[SettingT], record: RecordT) -> None:
        if not record.inconclusive:
            self.known.setdefault(candidate.id, record)

    def ask(self, situation: Situation) -> Choice[SettingT] | None:
        if not self.started:
            self.started = True
            self._advance(None)
        while self.wanted is not None and self.wanted.id in self.known:
            self._advance(self.known[self.wanted.id])
        if self.wanted is None:
            self.stopped_because = "the walk has ended"
            return None
        return Choice(self.wanted)

    def _advance(self, record: RecordT | None) -> None:
        try:
            self.wanted = next(self.walk) if record is None else self.walk.send(record)
        except StopIteration:
            self.wanted = None


def largest_batch(space: Space, budget_bytes: int | None, arm: str | None = None) -> Walk:
    """The largest batch that fits, as trainers' finders look for it: doubling until it fails, then
    bisection between. One arm: the user's own setting (the plainest of the space)."""
    ladder = arm_candidates(space, arm or space.candidates[0].arm)
    good, bad, at = -1, len(ladder), 0
    while at < len(ladder):
        if not is_feasible((yield ladder[at]), budget_bytes):
            bad = at
            break
        good, at = at, _doubled(ladder, at)
    while bad - good > 1:
        middle = (good + bad) // 2
        if is_feasible((yield ladder[middle]), budget_bytes):
            good = middle
        else:
            bad = middle


def _doubled(ladder: list[Candidate], at: int) -> int:
    wanted = 2 * ladder[at].setting.batch_size
    return next((i for i, c in enumerate(ladder) if c.setting.batch_size >= wanted), len(ladder))


def bounded_grid(space: Space, budget_bytes: int | None) -> Walk:
    """As DeepSpeed's autotuner: for each arm find the largest batch, then try batches spread below
    it, and go on while they get faster."""
    for arm in dict.fromkeys(c.arm for c in space.candidates):
        ladder = arm_candidates(space, arm)
        largest = -1
        walk = largest_batch(space, budget_bytes, arm)
        wanted = next(walk)
        while True:
            record = yield wanted
            if is_feasible(record, budget_bytes):
                largest = max(largest, ladder.index(wanted))
            try:
                wanted = walk.send(record)
            except StopIteration:
                break
        for share in range(1, BATCHES_PER_ARM):
            yield ladder[round(share * max(largest, 0) / BATCHES_PER_ARM)]


def boundary_walk(space: Space, prior: Prior, budget_bytes: int | None) -> Walk:
    """Arms by predicted rate at their predicted largest batch; in each, that batch, then down one
    rung on failure or up one on success. The prior only: nothing is learned across arms."""
    rate = {
        c.id: c.images / g.seconds for c, g in zip(space.candidates, prior.guesses, strict=True)
    }
    need = {c.id: g.num_bytes for c, g in zip(space.candidates, prior.guesses, strict=True)}

    def fitting(arm: str) -> list[Candidate]:
        ladder = arm_candidates(space, arm)
        return [c for c in ladder if budget_bytes is None or need[c.id] <= budget_bytes]

    arms = dict.fromkeys(c.arm for c in space.candidates)
    tops = [cs for arm in arms if (cs := fitting(arm))]
    tops.sort(key=lambda cs: -max(rate[c.id] for c in cs))
    for candidates in tops:
        yield from _walk_edge(
            arm_candidates(space, candidates[0].arm),
            max(range(len(candidates)), key=lambda i: rate[candidates[i].id]),
            budget_bytes,
        )


def _walk_edge(ladder: list[Candidate], at: int, budget_bytes: int | None) -> Walk:
    best = None
    direction = 0
    while 0 <= at < len(ladder):
        record = yield ladder[at]
        rate = record.images_per_second if is_feasible(record, budget_bytes) else None
        if rate is None:
            if direction == 1:
                return
            direction = -1
        elif best is None or rate > best:
            best = rate
            if direction == -1:
                return
            direction = 1
        else:
            return
        at += direction


def coordinate_descent(space: Space, prior: Prior, budget_bytes: int | None) -> Walk:
    """From the prior's fastest that should fit: every other value of one axis after another, the
    rung above and the one below, and on from whatever is faster, until nothing of one round is. A
    setting is taken at the largest rung of its own that should fit and is none above."""
    rates = [c.images / g.seconds for c, g in zip(space.candidates, prior.guesses, strict=True)]
    fits = [budget_bytes is None or g.num_bytes <= budget_bytes for g in prior.guesses]
    order = sorted(range(len(space)), key=lambda i: (not fits[i], -rates[i]))
    known: dict[int, float] = {}
    best = order[0]

    def rate(index: int) -> Generator[Candidate, MeasurementRecord, float]:
        if index not in known:
            record = yield space.candidates[index]
            measured = record.images_per_second if is_feasible(record, budget_bytes) else None
            known[index] = measured or 0.0
        return known[index]

    def neighbours(axis: str) -> list[int]:
        setting = space.candidates[best].setting
        if axis == "batch_size":
            ladder = arm_candidates(space, space.candidates[best].arm)
            at = [c.id for c in ladder].index(space.candidates[best].id)
            found = [space.index(c.setting) for c in ladder[max(at - 1, 0) : at + 2]]
        else:
            found = [largest(setting.model_copy(update={axis: v})) for v in space.choices[axis]]
        return sorted((i for i in found if i is not None and i != best), key=lambda i: -rates[i])

    def largest(setting: TrainSetting) -> int | None:
        """The rung that a setting is tried at."""
        rungs = (b for b in reversed(space.rungs) if b <= setting.batch_size)
        found = (space.index(setting.model_copy(update={"batch_size": b})) for b in rungs)
        return next((i for i in found if i is not None and fits[i]), None)

    starts = iter(order)
    while not (yield from rate(best)):
        best = next(starts)
    moved = True
    while moved:
        moved = False
        for axis in ("compile", "batch_size", *(a for a in space.axes if a != "compile")):
            for index in neighbours(axis):
                if (yield from rate(index)) > known[best]:
                    best, moved = index, True


def shuffled(candidates: Sequence[Candidate[SettingT]], seed: int) -> list[Candidate[SettingT]]:
    """The candidates in an order drawn at random."""
    found = list(candidates)
    Random(seed).shuffle(found)
    return found


WALKS: dict[str, Callable[[Space, Prior, int | None, int], Strategy]] = {
    "random": lambda space, _, budget, seed: ListStrategy(shuffled(space.candidates, seed)),
    "largest-batch": lambda space, _, budget, seed: WalkStrategy(largest_batch(space, budget)),
    "bounded-grid": lambda space, _, budget, seed: WalkStrategy(bounded_grid(space, budget)),
    "boundary-walk": lambda space, prior, budget, seed: WalkStrategy(
        boundary_walk(space, prior, budget)
    ),
    "descent": lambda space, prior, budget, seed: WalkStrategy(
        coordinate_descent(space, prior, budget)
    ),
}
