"""Strategies by the names that `--strategy` takes."""

from __future__ import annotations

from search.space import Space
from search.strategies.planner_strategy import PlannerStrategy
from search.strategies.strategy import Strategy
from search.strategies.walks import WALKS
from search.surrogate.prior import Prior

STRATEGIES = ("planner", "tpe", "gp", "random", *WALKS)


def make_strategy(
    name: str,
    space: Space,
    prior: Prior,
    budget_bytes: int | None,
    *,
    tolerance: float,
    images: float | None,
    seed: int,
) -> Strategy:
    """The strategy of `STRATEGIES` that is called `name`; `tolerance` and `images` are the
    planner's, `seed` is of those that draw at random.

    Raises PlannerError where it needs what is not installed.
    """
    if name == "planner":
        return PlannerStrategy(space, prior, budget_bytes, tolerance=tolerance, images=images)
    if name in WALKS:
        return WALKS[name](space, prior, budget_bytes, seed)
    from search.strategies.optuna_samplers import SamplerStrategy, make_sampler

    return SamplerStrategy(space, make_sampler(name, seed), budget_bytes)
