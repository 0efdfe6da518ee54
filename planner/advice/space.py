"""The space of a wish: which settings are tried. First the levers that cost nothing by
themselves are adopted; then come all combinations of the others, each at every micro-batch."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from planner.advice.table import Ranking, Table
from planner.advice.wish import ALLOCATOR, LEVERS, Choice, Lever, Updates, Wish
from planner.core.errors import PlannerError, UnsupportedError
from planner.core.schema import TrainSetting
from planner.memory.caching_allocator import SMALL_SEGMENT_BYTES

MAX_MICRO_BATCHES = 12  # tried for one combination of the other levers
NO_RECORDING = "not recorded: --record tries it"
LEAST_SAVING = 0.01  # of the bytes, of a change that saves no time: a judgement
MAX_BATCH = 4096  # a Swin's step is long saturated
PLAINLY_COMBINED = ("none", "blocks")  # checkpointings that go with every other lever
_COMBINED = {"checkpointing", "compile", "compile_scope", "batch_size", "accumulate"}


@dataclass(frozen=True)
class LeverRefusal:
    """Changes of a lever that are not available, and why."""

    lever: str
    values: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Combinations:
    """What a search looks at: `base` is the wish's sample with the adopted levers, `choices` are
    all combinations of the others on top of it, each at every micro-batch. The last resorts that
    were `held_back` are in none of them."""

    base: Choice
    adopted: tuple[str, ...]
    choices: tuple[Choice, ...]
    refusals: tuple[LeverRefusal, ...]
    held_back: tuple[str, ...]


def combine_levers(wish: Wish, table: Table, resorts: bool = False) -> Combinations:
    """Tries every lever on the wish by itself: adopts those that cost nothing, and combines those
    that are available, the last `resorts` only if asked. `wish` is the table's, or allows more."""
    refusals: list[LeverRefusal] = []
    base, adopted = _adopt(table, refusals)
    combined = [base]
    held_back = []
    for lever in LEVERS:
        if lever.role in ("adopt", "micro-batch") or lever.effect not in wish.allow:
            continue
        if lever.role == "resort" and not resorts and not _is_in_use(lever, base):
            held_back += [lever.name] if wish.changes(lever, base) else []
            continue
        changed = list(_available_changes(table, base, lever, refusals))
        is_worse = lever.role == "either" and all(
            table.rate(c) < table.rate(base) and table.least_bytes(c) > table.least_bytes(base)
            for c in changed
        )
        if changed and not is_worse:
            combined += [c for choice in combined for c in _possible_changes(wish, choice, lever)]
    unique = dict.fromkeys(c for c in combined if _is_looked_at(c.setting, base.setting))
    return Combinations(
        base,
        tuple(adopted),
        tuple(c for choice in unique for c in micro_batches(wish, choice)),
        tuple({(r.lever, r.values): r for r in refusals}.values()),  # the last: of `base`
        tuple(held_back),
    )


def _adopt(table: Table, refusals: list[LeverRefusal]) -> tuple[Choice, list[str]]:
    """The wish's sample with every lever that costs nothing, and the names of these levers."""
    base = table.wish.sample
    adopted: list[str] = []
    untried = [lever for lever in LEVERS if lever.role in ("adopt", "either")]
    while untried:  # a lever that costs bytes may cost none beside one that is adopted after it
        costly = []
        for lever in untried:
            better = _free_change(table, base, lever, refusals)
            if better is None:
                costly.append(lever)
            else:
                adopted.append(lever.name)
                base = better
        untried = costly if len(costly) < len(untried) else []
    return base, adopted


def _is_in_use(lever: Lever, choice: Choice) -> bool:
    fields = (f for f in lever.fields if f != ALLOCATOR)
    return any(choice.value(f) != TrainSetting.model_fields[f].default for f in fields)


def may_need_resorts(table: Table, combinations: Combinations, ranking: Ranking) -> bool:
    """Whether the resorts that were held back may be better than the best: where that may not fit,
    or where an eager step with all the memory it wants would be faster. A resort moves more data
    than that step does, and does not go with compilation."""
    if not combinations.held_back:
        return False
    if ranking.best is None or not table.estimate(ranking.best).fits_surely:
        return True
    largest = max(micro_batches(table.wish, combinations.base), key=lambda c: c.setting.batch_size)
    if table.is_on_shapes:  # at once; the largest batch of a model that is recorded is not
        table.settle([largest])
    return table.rate(largest) > table.rate(ranking.best)


def _free_change(
    table: Table, base: Choice, lever: Lever, refusals: list[LeverRefusal]
) -> Choice | None:
    """The fastest change of a lever that costs no seconds and at most as many bytes as one of the
    allocator's smallest segments, which anything small may need; a change that saves no seconds
    must save a share of the bytes worth naming.

    The bytes are those alive at the peak, since it is luck what the allocator's rounding makes of
    another step; of a change of the allocator itself they are the device's."""
    is_allocator = ALLOCATOR in lever.fields
    if is_allocator and (base.expandable or table.wish.has_expandable_segments):
        return None

    def num_bytes(choice: Choice) -> int:
        if is_allocator:
            return table.estimate(choice).device_total_bytes
        return table.least_bytes(choice)

    best, best_seconds = base, table.seconds(base)
    for changed in _available_changes(table, base, lever, refusals):
        seconds = table.seconds(changed)
        if seconds > best_seconds:
            continue
        before = num_bytes(best)
        added = num_bytes(changed) - before
        is_faster = seconds < best_seconds
        if added <= SMALL_SEGMENT_BYTES if is_faster else added < -LEAST_SAVING * before:
            best, best_seconds = changed, seconds
    return None if best == base else best


def _available_changes(
    table: Table, choice: Choice, lever: Lever, refusals: list[LeverRefusal]
) -> Iterator[Choice]:
    """What `lever` makes of a choice and can be estimated; the others are added to `refusals`."""
    refused: dict[str, list[str]] = {}
    for updates in table.wish.changes(lever, choice):
        try:
            changed = table.wish.apply(choice, updates)
            if not table.has_step(changed):
                raise UnsupportedError(NO_RECORDING, "Add --record.")
            yield changed
        except PlannerError as error:
            # Without the value, so that the same reason is given once.
            reason = re.sub(r": \w+ is .*?\.(?= |$)", ".", " ".join(error.message.split()))
            refused.setdefault(reason, []).append(_describe(updates))
    refusals += [LeverRefusal(lever.name, tuple(values), r) for r, values in refused.items()]


def _describe(updates: Updates) -> str:
    return ", ".join(f"{field}={value}" for field, value in updates.items())


def _possible_changes(wish: Wish, choice: Choice, lever: Lever) -> Iterator[Choice]:
    """`choice` with each change of `lever` that it can be run with."""
    for updates in wish.changes(lever, choice):
        with suppress(PlannerError):
            yield wish.apply(choice, updates)


def _is_looked_at(setting: TrainSetting, base: TrainSetting) -> bool:
    """Whether a combination is tried. Checkpointing, compilation and the micro-batch are
    combined freely; of the other levers one at a time, beside no checkpointing or that of all
    blocks. Levers of one field count as one."""
    changed = setting.differences(base).keys() - _COMBINED
    first_levers = {next(lever for lever in LEVERS if field in lever.fields) for field in changed}
    is_plain = len(first_levers) == 1 and setting.checkpointing in PLAINLY_COMBINED
    return not changed or is_plain


def micro_batches(wish: Wish, choice: Choice) -> Iterator[Choice]:
    """`choice` at each way to split the images of its step; where the batch is free, at batches
    from small to large."""
    for batch_size, num_micro_batches in _splits(wish, choice.setting):
        split = choice.updated({"batch_size": batch_size, "accumulate": num_micro_batches})
        try:
            setting = TrainSetting.model_validate(split.setting.model_dump())
            wish.resolved(setting)
        except (PlannerError, ValueError):
            continue
        yield Choice(setting, choice.expandable)


def _splits(wish: Wish, setting: TrainSetting) -> Iterable[tuple[int, int]]:
    """(micro-batch, number of micro-batches). A batch of 1 is another step, and tried only
    where nothing else divides."""
    if wish.keeps_batch:
        return [(setting.batch_size, setting.accumulate)]
    if wish.images_per_device_step is None:
        return [(b, setting.accumulate) for b in batch_ladder(MAX_BATCH) if b > 1]
    sizes = divisors(wish.images_per_device_step)
    chosen = spread([size for size in sizes if size > 1] or sizes, MAX_MICRO_BATCHES)
    return [(size, wish.images_per_device_step // size) for size in chosen]


def divisors(number: int) -> list[int]:
    """The divisors of `number`, smallest first."""
    return [d for d in range(1, number + 1) if number % d == 0]


def batch_ladder(largest: int) -> tuple[int, ...]:
    """Powers of two and 3·2^k up to `largest`."""
    powers = [2**k for k in range(largest.bit_length())]
    return tuple(sorted(b for p in powers for b in {p, 3 * p} if b <= largest))


def spread(values: Sequence[int], limit: int) -> list[int]:
    """At most `limit` of `values` (rising), evenly over their order; the multiples of 8 and both
    ends stay longest."""
    kept = list(values)
    while len(kept) > limit:
        ratios = {b: (b % 8 == 0, b / a) for a, b in pairwise(kept[:-1])}
        kept.remove(min(ratios, key=ratios.__getitem__))
    return kept
