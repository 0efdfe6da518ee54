"""A space as Optuna has it."""

from __future__ import annotations

from search.space import make_space
from search.study.params import SpaceParams
from tests.search.tables import GPU, MODEL, SMALL


def test_parameters_and_candidates_are_one_to_one() -> None:
    space = make_space(MODEL, GPU, restrict=SMALL, batch_sizes=(8, 16))
    params = SpaceParams(space)
    for c in space.candidates:
        assert params.candidate(params.of(c)) == c


def test_any_field_is_a_parameter_where_it_is_an_axis() -> None:
    restrict = {**SMALL, "lora_rank": (0, 8), "ema": (False, True)}
    space = make_space(MODEL, GPU, restrict=restrict, batch_sizes=(8, 16))
    params = SpaceParams(space)
    assert {"lora_rank", "ema"} <= set(params.distributions)
    for c in space.candidates:
        assert params.candidate(params.of(c)) == c


def test_a_combination_that_the_space_lacks_is_no_candidate() -> None:
    params = SpaceParams(make_space(MODEL, GPU, restrict=SMALL, batch_sizes=(8, 16)))
    assert params.candidate({"batch_rung": 7}) is None
