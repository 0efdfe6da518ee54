"""The space of a wish: which settings are looked at. First the levers that cost nothing by
themselves are adopted; then come all combinations of the others, each at every micro-batch."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from planner.advice.table import Found, Table
from planner.advice.wish import ALLOCATOR, LEVERS, Choice, Lever, Wish
from planner.core.errors import PlannerError, UnsupportedError
from planner.core.schema import TrainSetting
from planner.memory.caching_allocator import SMALL_SEGMENT_BYTES

MAX_MICRO_BATCHES = 12  # looked at for one combination of the other levers
NO_RECORDING = "not recorded: --record tries it"
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


def offer(wish: Wish, table: Table, resorts: bool = False) -> Offered:
    """Tries every lever on the wish by itself: adopts what is free, and lists what the search is to
    combine, last `resorts` too, and what is not available."""
    refusals: list[Refusal] = []
    base = wish.sample
    adopted: list[str] = []
    untried = [lever for lever in LEVERS if lever.role in ("adopt", "either")]
    while untried:  # what cost bytes may cost none beside what was adopted after it
        left = []
        for lever in untried:
            better = _free(wish, table, base, lever, refusals)
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
        changed = list(_available(wish, table, base, lever, refusals))
        is_worse = lever.role == "either" and all(
            table.rate(c) < table.rate(base) and table.least_bytes(c) > table.least_bytes(base)
            for c in changed
        )
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


def may_need_resorts(wish: Wish, table: Table, offered: Offered, found: Found) -> bool:
    """Whether what was held back may be better than what was found: where that may not fit, or an
    eager step with all the memory it wants would be faster. A resort moves more than that one, and
    does not go with compilation."""
    if not offered.held_back:
        return False
    if found.best is None or not table.at(found.best).fits_surely:
        return True
    largest = max(micro_batches(wish, offered.base), key=lambda c: c.setting.batch_size)
    if table.is_on_shapes:  # at once; the largest batch of a model that is recorded is not
        table.settle([largest])
    return table.rate(largest) > table.rate(found.best)


def _free(
    wish: Wish, table: Table, base: Choice, lever: Lever, refusals: list[Refusal]
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
            return table.at(choice).device_total_bytes
        return table.least_bytes(choice)

    best, seconds = base, table.seconds(base)
    for changed in _available(wish, table, base, lever, refusals):
        taken = table.seconds(changed)
        if taken > seconds:
            continue
        before = needs(best)
        more = needs(changed) - before
        if more <= SMALL_SEGMENT_BYTES if taken < seconds else more < -LEAST_SAVING * before:
            best, seconds = changed, taken
    return None if best == base else best


def _available(
    wish: Wish, table: Table, choice: Choice, lever: Lever, refusals: list[Refusal]
) -> Iterator[Choice]:
    """What `lever` makes of a choice; what it cannot is added to `refusals`."""
    refused: dict[str, list[str]] = {}
    for updates in wish.changes(lever, choice):
        try:
            changed = wish.apply(choice, updates)
            if not table.has_step(changed):
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
