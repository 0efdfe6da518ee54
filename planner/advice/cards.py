"""What a larger card would give: the same wish, and the same recommendation, on the next ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby

from planner.advice.table import Table
from planner.advice.wish import Choice, Wish
from planner.machine.hardware.gpu import Gpu, all_gpus, lacks, peak_flops

MAX_CARDS = 4
LARGER = 1.05  # times the memory: what a driver keeps for itself differs by less


@dataclass(frozen=True)
class Card:
    """A card of the catalogue. `plain_fits` and `plain_rate` (images/s) are of the
    wish as it stands; `rate` and `fits` of the recommendation, None where there is none."""

    name: str
    title: str
    memory_bytes: int
    plain_fits: bool
    plain_rate: float
    fits: bool | None
    rate: float | None


def larger_cards(wish: Wish, table: Table, goal: Choice | None, budget: int) -> tuple[Card, ...]:
    """The next cards with more memory: of each size the fastest, up to the first in which the wish
    fits as it stands, and the fastest of all above it."""
    wanted = [wish.plain.precision, *([goal.setting.precision] if goal else [])]
    known = [g for g in all_gpus() if not any(lacks(g, precision) for precision in wanted)]
    found: list[Table] = []
    for gpu in _next(known, wish.plain.precision, budget):
        found.append(Table(replace(wish, gpu=gpu, memory_bytes=None), table))
        if len(found) >= 2 and _fits(found[-1], Choice(wish.plain), table):
            break
    shown = found[: MAX_CARDS - 1] + found[-1:] if len(found) > MAX_CARDS else found
    return tuple(_card(there, goal, table) for there in shown)


def _next(gpus: Iterable[Gpu], precision: str, budget: int) -> Iterable[Gpu]:
    """Of each larger memory the fastest card, unless a smaller one is as fast."""

    def size(gpu: Gpu) -> int:
        return round(gpu.memory_bytes / budget / 0.1)

    larger = [gpu for gpu in gpus if gpu.memory_bytes > LARGER * budget]
    larger.sort(key=lambda gpu: (size(gpu), -(peak_flops(gpu, precision) or 0.0)))
    for _, same in groupby(larger, size):
        yield next(same)


def _card(there: Table, goal: Choice | None, here: Table) -> Card:
    gpu, plain = there.wish.gpu, Choice(there.wish.plain)
    assert gpu is not None, "a card was named"
    return Card(
        name=gpu.name,
        title=gpu.title,
        memory_bytes=gpu.memory_bytes,
        plain_fits=_fits(there, plain, here),
        plain_rate=there.rate(plain),
        fits=_fits(there, goal, here) if goal else None,
        rate=there.rate(goal) if goal else None,
    )


def _fits(there: Table, choice: Choice, here: Table) -> bool:
    """What a choice needs differs from card to card by the context and by kernels' scratch alone:
    only where a card is about as large as what is needed here is the allocator replayed."""
    assert there.wish.gpu is not None, "a card was named"
    memory, need = there.wish.gpu.memory_bytes, here.at(choice).device_total_bytes
    if memory > LARGER * need or need > LARGER * memory:
        return memory > need
    return bool(there.at(choice).fits)
