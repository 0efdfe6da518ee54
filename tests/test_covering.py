"""Few cases of a matrix: every value, every pair asked for, and few cases."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tests.covering import chosen_of, covering


@given(st.lists(st.integers(1, 5), min_size=2, max_size=4))
def test_every_value_is_shown_by_as_few_cases_as_the_longest_axis_has(sizes: list[int]) -> None:
    chosen = chosen_of(list(itertools.product(*(range(n) for n in sizes))))
    assert len(chosen) == max(sizes)
    for axis, size in enumerate(sizes):
        assert {case[axis] for case in chosen} == set(range(size))


def test_pairs_of_two_axes_are_all_shown() -> None:
    chosen = chosen_of(list(itertools.product("ab", range(4), range(3))), [(0, 1), (0, 2)])
    assert {case[:2] for case in chosen} == set(itertools.product("ab", range(4)))
    assert {case[::2] for case in chosen} == set(itertools.product("ab", range(3)))
    assert len(chosen) == 8


def test_what_is_impossible_is_left_out() -> None:
    cases = covering((1, 2, 3), ("x", "y"), possible=lambda n, s: (n, s) != (3, "y"))
    assert {n for n, _ in cases} == {1, 2, 3}
    assert (3, "y") not in cases
