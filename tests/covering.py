"""Few of many combinations: what shows a law that holds over several axes.

A law over several axes (models, precisions, kinds of checkpointing …) holds for every combination
of their values. A test meets each value, and each pair of values that it names, by the same few
cases each time.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

Case = tuple[Any, ...]
Pairs = Collection[tuple[int, int]]


def covering(
    *axes: Iterable[Any], pairs: Pairs = (), possible: Callable[..., bool] = lambda *_: True
) -> list[Case]:
    """`chosen_of` the possible combinations of `axes`."""
    return chosen_of((case for case in itertools.product(*axes) if possible(*case)), pairs)


def chosen_of(cases: Iterable[Case], pairs: Pairs = ()) -> list[Case]:
    """Cases that show each value of each axis, and for the two axes of each of `pairs` (by
    position) each value of one with each of the other, as far as `cases` do.

    As few as a greedy choice finds: next is what shows most that was not shown, among equals what
    repeats least.
    """
    traits = [(case, _traits(case, pairs)) for case in cases]
    left = {trait for _, shown in traits for trait in shown}
    met: Counter[Any] = Counter()
    chosen: list[Case] = []
    while left:
        case, shown = max(
            traits, key=lambda pair: (len(left & pair[1]), -sum(met[t] for t in pair[1]))
        )
        chosen.append(case)
        met.update(shown)
        left -= shown
    return chosen


def _traits(case: Case, pairs: Pairs) -> set[tuple[Any, ...]]:
    named = [(axis, repr(value)) for axis, value in enumerate(case)]
    return {*named, *((named[a], named[b]) for a, b in pairs)}
