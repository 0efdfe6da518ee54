"""Few of many combinations: those that the default run takes, and why the others are long.

A law over several axes (models, precisions, kinds of checkpointing …) holds for every combination
of their values. `covering` gives all of them and marks as `combinations` what repeats values that
others show, so that the default run meets each value and the long run each combination.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

Case = tuple[Any, ...]
Pairs = Collection[tuple[int, int]]


def covering(
    *axes: Iterable[Any], pairs: Pairs = (), possible: Callable[..., bool] = lambda *_: True
) -> list[Any]:
    """Every possible combination as a `pytest.param`; `chosen_of` them without a mark."""
    cases = [case for case in itertools.product(*axes) if possible(*case)]
    chosen = {id(case) for case in chosen_of(cases, pairs)}
    return [
        pytest.param(*case, marks=() if id(case) in chosen else pytest.mark.combinations)
        for case in cases
    ]


def each_value_and_long_pairs(cases: Iterable[Case], pairs: Pairs) -> list[Any]:
    """As `chosen_of`, where the default run meets each value and the long run each of `pairs`."""
    cases = list(cases)
    short = chosen_of(cases)
    longer = [case for case in chosen_of(cases, pairs) if case not in short]
    return [*short, *(pytest.param(*case, marks=pytest.mark.combinations) for case in longer)]


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
