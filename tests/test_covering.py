"""The default run's share of a matrix: every value, every pair asked for, and few cases."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tests.covering import chosen_of, covering, each_value_and_long_pairs


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


def test_pairs_that_are_long_are_beside_each_value_once() -> None:
    cases = list(itertools.product("ab", range(4), range(3)))
    found = each_value_and_long_pairs(iter(cases), [(0, 1)])
    short = [case for case in found if isinstance(case, tuple) and not hasattr(case, "marks")]
    longer = [case for case in found if hasattr(case, "marks")]
    assert short == chosen_of(cases)
    assert all(case.marks[0].name == "combinations" for case in longer)
    shown = {case[:2] for case in (*short, *(case.values for case in longer))}
    assert shown == set(itertools.product("ab", range(4)))


def test_what_is_not_chosen_says_why_it_is_long_and_what_is_impossible_is_left_out() -> None:
    params = covering((1, 2, 3), ("x", "y"), possible=lambda n, s: (n, s) != (3, "y"))
    assert [param.values for param in params] == [(1, "x"), (1, "y"), (2, "x"), (2, "y"), (3, "x")]
    marked = {param.values: param.marks[0].name for param in params if param.marks}
    assert marked == {(1, "y"): "combinations", (2, "x"): "combinations"}
