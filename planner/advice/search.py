"""Which choices are looked at, and which of them are the best that fit and the least for their
speed.

First the levers that cost nothing by themselves are adopted; then all combinations of the others
are gone through from the fastest to the slowest. What a choice needs is bounded from below by what
is live; the allocator is replayed only for those that the bound leaves open. So the answer is that
of estimating every combination.

The best is not the fastest by a figure: of those that `Estimates.is_slower` cannot tell from the
fastest it is one that fits surely, then the one whose images of a step are nearest to the wish's,
then the fastest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import pairwise

from planner.advice.estimates import Estimates
from planner.advice.levers import ALLOCATOR, LEVERS, Lever
from planner.advice.wish import Choice, Wish
from planner.core.errors import PlannerError, UnsupportedError
from planner.core.schema import TrainSetting
from planner.memory.caching_allocator import SMALL_SEGMENT_BYTES
from planner.throughput.result import APART

MAX_MICRO_BATCHES = 12  # looked at for one combination of the other levers
NO_RECORDING = "not recorded: --record tries it"
# The front is for choosing from: its next choice needs less by this share of the memory at least,
# and none is slower than this share of the fastest. Judgements.
FRONT_STEP = 0.05
FRONT_END = 0.7
LEAST_SAVING = 0.01  # of the bytes, of a change that saves no time: a judgement
MAX_BATCH = 4096  # a Swin's step is long saturated
PLAINLY_COMBINED = ("none", "blocks")  # checkpointings that go with every other lever
_COMBINED = {"checkpointing", "compile", "compile_scope", "batch_size", "accumulate"}
_FAMILY = {"pure bf16": "precision", "fp8": "precision"}


@dataclass(frozen=True)
class Refusal:
    """Changes of a lever that are not available, and why."""

    lever: str
    values: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Offered:
    """What a search combines: `base` is the wish's sample with the adopted levers, `choices` all
    combinations of the others on top of it, each at every micro-batch, but for the last resorts
    that were `held_back`."""

    base: Choice
    adopted: tuple[str, ...]
    choices: tuple[Choice, ...]
    refusals: tuple[Refusal, ...]
    held_back: tuple[str, ...]


class Best:
    """The best of choices that come fastest first, of which `fastest` is the first that fits."""

    def __init__(self, estimates: Estimates, fastest: Choice, budget: int) -> None:
        self.estimates = estimates
        self.fastest = fastest
        self.budget = budget
        self.known: Choice | None = None  # none of those that follow can be better
        self.others: list[Choice] = []
        self.add(fastest)

    def may_improve(self, choice: Choice, seconds: float) -> bool:
        """Whether one that takes `seconds` an image at least, and is slower, may be better."""
        estimates = self.estimates
        ratio = estimates.rate(self.fastest) * seconds
        if self.known is not None or ratio > estimates.slowest_alike(self.fastest):
            return False
        is_nearer = self._rank(choice) < self._rank(self.fastest)
        return is_nearer or estimates.least_high_bytes(choice) <= self.budget

    def add(self, choice: Choice) -> None:
        if self.known is not None or self.estimates.is_slower(choice, self.fastest):
            return
        if self._rank(choice) == 0 and self.estimates.fits_surely(choice, self.budget):
            self.known = choice
        self.others.append(choice)

    def choice(self) -> Choice:
        """Estimates no more than it must."""
        if self.known is not None:
            return self.known
        nearest = sorted(self.others, key=self._rank)  # the fastest first where they are alike
        sure = (c for c in nearest if self.estimates.fits_surely(c, self.budget))
        return next(sure, None) or next(c for c in nearest if self.estimates.at(c).fits)

    def _rank(self, choice: Choice) -> float:
        return self.estimates.wish.distance(choice)


@dataclass
class Found:
    """`best` fits, and `fastest` of them by the figures; `surely` is the fastest whose upper end
    fits; `front` are choices that fit, fastest first, each the fastest that needs less than the one
    before it by FRONT_STEP of the memory; `ways` the best of each way to save memory, the best of
    all first and then by speed; `nearest` needs the least of all, where nothing fits."""

    best: Choice | None = None
    fastest: Choice | None = None
    surely: Choice | None = None
    front: list[Choice] = field(default_factory=list)
    ways: list[Choice] = field(default_factory=list)
    nearest: Choice | None = None


def offer(wish: Wish, estimates: Estimates, resorts: bool = False) -> Offered:
    """Tries every lever on the wish by itself: adopts what is free, and lists what the search is to
    combine, last `resorts` too, and what is not available."""
    refusals: list[Refusal] = []
    base = wish.sample
    adopted: list[str] = []
    untried = [lever for lever in LEVERS if lever.role in ("adopt", "either")]
    while untried:  # what cost bytes may cost none beside what was adopted after it
        left = []
        for lever in untried:
            better = _free(wish, estimates, base, lever, refusals)
            if better is None:
                left.append(lever)
            else:
                adopted.append(lever.name)
                base = better
        untried = left if len(left) < len(untried) else []
    arms = [base]
    held_back = []
    for lever in LEVERS:
        if lever.role in ("adopt", "micro-batch") or lever.effect not in wish.allow:
            continue
        if lever.role == "resort" and not resorts and not _uses(base, lever):
            held_back += [lever.name] if wish.changes(lever, base) else []
            continue
        changed = list(_available(wish, estimates, base, lever, refusals))
        is_worse = lever.role == "either" and all(estimates.costs_both(c, base) for c in changed)
        if changed and not is_worse:
            arms += [c for arm in arms for c in _combined(wish, arm, lever)]
    unique = dict.fromkeys(arm for arm in arms if _is_offered(arm.setting, base.setting))
    return Offered(
        base,
        tuple(adopted),
        tuple(c for arm in unique for c in micro_batches(wish, arm)),
        tuple({(r.lever, r.values): r for r in refusals}.values()),  # the last: of `base`
        tuple(held_back),
    )


def _uses(choice: Choice, lever: Lever) -> bool:
    fields = (f for f in lever.fields if f != ALLOCATOR)
    return any(getattr(choice.setting, f) != TrainSetting.model_fields[f].default for f in fields)


def may_need_resorts(wish: Wish, estimates: Estimates, offered: Offered, found: Found) -> bool:
    """Whether what was held back may be better than what was found: where that may not fit, or an
    eager step with all the memory it wants would be faster. A resort moves more than that one, and
    does not go with compilation."""
    if not offered.held_back:
        return False
    if found.best is None or not estimates.at(found.best).fits_surely:
        return True
    largest = max(micro_batches(wish, offered.base), key=lambda c: c.setting.batch_size)
    return estimates.rate(largest) > estimates.rate(found.best)


def _free(
    wish: Wish, estimates: Estimates, base: Choice, lever: Lever, refusals: list[Refusal]
) -> Choice | None:
    """The fastest change of a lever that costs no seconds, and no bytes but for one of the
    allocator's smallest segments, which whatever is small may need; where it saves no seconds, it
    saves a share of the bytes worth naming. They are those alive at the peak, but where the
    allocator itself is changed: what its rounding makes of another step is luck."""
    is_allocator = ALLOCATOR in lever.fields
    allocator = wish.config(base)
    if is_allocator and allocator is not None and allocator.expandable_segments:
        return None

    def needs(choice: Choice) -> int:
        if is_allocator:
            return estimates.at(choice).device_total_bytes
        return estimates.least_bytes(choice)

    best, seconds = base, estimates.seconds(base)
    for changed in _available(wish, estimates, base, lever, refusals):
        taken = estimates.seconds(changed)
        if taken > seconds:
            continue
        before = needs(best)
        more = needs(changed) - before
        if more <= SMALL_SEGMENT_BYTES if taken < seconds else more < -LEAST_SAVING * before:
            best, seconds = changed, taken
    return None if best == base else best


def _available(
    wish: Wish, estimates: Estimates, choice: Choice, lever: Lever, refusals: list[Refusal]
) -> Iterator[Choice]:
    """What `lever` makes of a choice; what it cannot is added to `refusals`."""
    refused: dict[str, list[str]] = {}
    for updates in wish.changes(lever, choice):
        try:
            changed = wish.apply(choice, updates)
            if not estimates.has_step(changed):
                raise UnsupportedError(NO_RECORDING)
            yield changed
        except PlannerError as error:
            # Without the value, so that what is refused alike is said once.
            reason = re.sub(r": \w+ is .*?\.(?= |$)", ".", " ".join(error.message.split()))
            refused.setdefault(reason, []).append(_said(updates))
    refusals += [Refusal(lever.name, tuple(values), r) for r, values in refused.items()]


def _said(updates: object) -> str:
    assert isinstance(updates, dict)
    return ", ".join(f"{field}={value}" for field, value in updates.items())


def _combined(wish: Wish, arm: Choice, lever: Lever) -> Iterator[Choice]:
    """`arm` with each change of `lever`, where both can be."""
    for updates in wish.changes(lever, arm):
        with suppress(PlannerError):
            yield wish.apply(arm, updates)


def _is_offered(setting: TrainSetting, base: TrainSetting) -> bool:
    """Of the levers beside checkpointing, compilation and the micro-batch one at a time, and that
    beside no checkpointing or that of all blocks."""
    changed = setting.differences(base).keys() - _COMBINED
    names = {lever.name for lever in LEVERS if changed & set(lever.fields)} - {"fused optimizer"}
    families = {_FAMILY.get(name, name) for name in names}
    return not families or (len(families) == 1 and setting.checkpointing in PLAINLY_COMBINED)


def micro_batches(wish: Wish, arm: Choice) -> Iterator[Choice]:
    """`arm` at each way to split the images of its step; where the batch is free, at batches from
    small to large."""
    for batch, parts in _splits(wish, arm.setting):
        setting = arm.setting.model_copy(update={"batch_size": batch, "accumulate": parts})
        try:
            setting = TrainSetting.model_validate(setting.model_dump())
            wish.resolved(setting)
        except (PlannerError, ValueError):
            continue
        yield Choice(setting, arm.expandable)


def _splits(wish: Wish, setting: TrainSetting) -> Iterable[tuple[int, int]]:
    """(micro-batch, accumulate). A batch of 1 is another step, and looked at only where nothing
    else divides."""
    if wish.share is None and "batch_size" not in wish.keep:
        return [(b, setting.accumulate) for b in batch_ladder(MAX_BATCH) if b > 1]
    if wish.share is None or not wish.is_splittable:
        return [(setting.batch_size, setting.accumulate)]
    known = divisors(wish.share)
    sizes = spread([d for d in known if d > 1] or known, MAX_MICRO_BATCHES)
    return [(b, wish.share // b) for b in sizes]


def divisors(number: int) -> list[int]:
    """Those of `number`, smallest first."""
    return [d for d in range(1, number + 1) if number % d == 0]


def batch_ladder(largest: int) -> tuple[int, ...]:
    """Powers of two and 3·2^k up to `largest`."""
    powers = [2**k for k in range(largest.bit_length())]
    return tuple(sorted(b for p in powers for b in {p, 3 * p} if b <= largest))


def spread(values: Sequence[int], most: int) -> list[int]:
    """At most `most` of `values` (rising), evenly over their order; the multiples of 8 and both
    ends stay longest."""
    kept = list(values)
    while len(kept) > most:
        ratios = {b: (b % 8 == 0, b / a) for a, b in pairwise(kept[:-1])}
        kept.remove(min(ratios, key=ratios.__getitem__))
    return kept


def search(wish: Wish, estimates: Estimates, choices: Iterable[Choice], budget: int) -> Found:
    """Goes through `choices` from the fastest to the slowest."""
    found = Found()
    least: dict[Choice, int] = {}
    # Alike ones together, since they share a ledger; accumulating ones first: they rule out others.
    for choice in sorted(choices, key=_recording):
        with suppress(UnsupportedError):  # no trace is kept
            if not estimates.surely_exceeds(choice, budget):
                least[choice] = estimates.least_bytes(choice)
    step = int(FRONT_STEP * budget)
    next_below, slowest = budget + 1, 0.0
    best: dict[object, Best] = {}  # by the way to save memory; of all by None

    def is_first(choice: Choice, seconds: float) -> bool:
        """Whether a choice that takes `seconds` an image at least may be the next of the front, or
        the first that fits surely."""
        if least[choice] < next_below and 1 / seconds >= slowest:
            return True
        return found.surely is None and estimates.least_high_bytes(choice) <= budget

    def may_matter(choice: Choice, seconds: float) -> bool:
        """Once this is false it stays so: `next_below` only falls, and what is found stays."""
        if is_first(choice, seconds):
            return True
        known = [best[scope] for scope in _scopes(choice) if scope in best]
        return len(known) < 2 or any(b.may_improve(choice, seconds) for b in known)

    put_off: dict[object, list[Choice]] = {}  # by their way: they may fit, and not surely

    def settle(way: object) -> None:
        for choice in put_off.pop(way, ()):
            if way in best:
                best[way].add(choice)
            elif estimates.at(choice).fits:
                best[way] = Best(estimates, choice, budget)

    fitting = [choice for choice, need in least.items() if need <= budget]
    for choice in _fastest_first(estimates, fitting, may_matter):
        rate, way = estimates.rate(choice), _way(choice)
        if way in put_off and rate * APART < estimates.rate(put_off[way][0]):
            settle(way)
            if not may_matter(choice, 1 / rate):
                continue
        known = [best[scope] for scope in _scopes(choice) if scope in best]
        for one in known:
            one.add(choice)
        if not is_first(choice, 1 / rate):
            if len(known) == len(_scopes(choice)):
                continue
            if None in best and estimates.least_high_bytes(choice) > budget:
                put_off.setdefault(way, []).append(choice)
                continue
        estimate = estimates.at(choice)
        if way in put_off:
            if estimate.fits_surely and wish.distance(choice) == 0:
                del put_off[way]  # whichever of them fits, this one is the best of its way
            else:
                settle(way)
                if way in best:
                    best[way].add(choice)
        if not estimate.fits:
            continue
        if found.fastest is None:
            found.fastest, slowest = choice, FRONT_END * rate
        if found.surely is None and estimate.fits_surely:
            found.surely = choice
        for scope in _scopes(choice):
            if scope not in best:
                best[scope] = Best(estimates, choice, budget)
        if estimate.device_total_bytes < next_below and rate >= slowest:
            next_below = estimate.device_total_bytes - step
            found.front.append(choice)
    for way in list(put_off):
        settle(way)
    if found.fastest is None:
        found.nearest = _nearest(estimates, least)
        return found
    found.best = best.pop(None).choice()
    del best[_way(found.best)]
    others = [one.choice() for one in best.values()]
    found.ways = [found.best, *sorted(others, key=estimates.rate, reverse=True)]
    return found


def _scopes(choice: Choice) -> tuple[object, object]:
    """In what a choice may be the best: of all, and of its way."""
    return None, _way(choice)


def _fastest_first(
    estimates: Estimates, choices: Sequence[Choice], may_matter: Callable[[Choice, float], bool]
) -> Iterator[Choice]:
    """Those that may matter when their turn comes, by images per second; of equal ones that with
    the fewest changes.

    A choice is timed only when its turn may have come. Until then its rate is bounded by that of
    the next larger micro-batch, whose work an image is no more; and the largest one's that is not
    compiled by that of the same compiled.
    """
    plain = estimates.wish.plain
    arms: dict[Choice, list[Choice]] = {}
    for choice in sorted(choices, key=lambda c: -c.setting.batch_size):
        alike = choice.setting.model_copy(update={"batch_size": 1, "accumulate": 1})
        arms.setdefault(replace(choice, setting=alike), []).append(choice)
    place = {choice: number for number, choice in enumerate(choices)}
    smaller = {a: b for arm in arms.values() for a, b in pairwise(arm)}
    quicker = _compiled_twins(estimates, choices)
    heap: list[tuple[float, int, int, bool, Choice]] = []

    def push(bound: float, is_exact: bool, choice: Choice | None) -> None:
        if choice is not None:
            changes = len(choice.setting.differences(plain))
            heappush(heap, (bound, changes, place[choice], is_exact, choice))

    for largest, *_ in arms.values():
        twin = quicker.get(largest)
        push(1 / estimates.rate(twin or largest), twin is None, largest)
    while heap:
        bound, _, _, is_exact, choice = heappop(heap)
        if not may_matter(choice, bound):
            push(bound, False, smaller.get(choice))
        elif is_exact:
            push(bound, False, smaller.get(choice))
            yield choice
        else:
            push(1 / estimates.rate(choice), True, choice)


def _compiled_twins(estimates: Estimates, choices: Sequence[Choice]) -> dict[Choice, Choice]:
    """{eager choice: the same compiled, where that is estimated from the eager step}: fusing only
    takes bytes and launches away, so that it is never slower."""
    known = set(choices)
    twins = {}
    for choice in choices:
        twin = replace(choice, setting=choice.setting.model_copy(update={"compile": "default"}))
        if choice.setting.compile == "off" and twin in known and estimates.shares_eager_step(twin):
            twins[choice] = twin
    return twins


def _nearest(estimates: Estimates, least: dict[Choice, int]) -> Choice | None:
    """The choice that needs the least bytes; the fastest of those alike."""
    best: tuple[int, float, Choice] | None = None
    for choice in sorted(least, key=least.__getitem__):
        if best is not None and least[choice] > best[0]:
            break
        need = estimates.at(choice).device_total_bytes
        if best is None or (need, estimates.seconds(choice)) < best[:2]:
            best = need, estimates.seconds(choice), choice
    return best[2] if best else None


def _way(choice: Choice) -> object:
    """What a way to save memory is, whatever its micro-batch and compile mode."""
    free = {"batch_size": 1, "accumulate": 1, "compile": "off", "activation_memory_budget": 1.0}
    setting = choice.setting
    return setting.model_copy(update=free), setting.activation_memory_budget


def _recording(choice: Choice) -> tuple[bool, str, int]:
    setting = choice.setting
    bare = setting.model_copy(update={"batch_size": 1, "accumulate": 1, "compile": "off"})
    return setting.accumulate == 1, bare.model_dump_json(), setting.batch_size
