"""Strategies by the names that `--strategy` takes."""

from __future__ import annotations

from search.options import SearchOptions
from search.space import Space
from search.strategies.planner_strategy import PlannerStrategy
from search.strategies.strategy import Strategy
from search.strategies.walks import WALKS, WalkStrategy
from search.surrogate.prior import Prior


def make_strategy(
    options: SearchOptions, space: Space, prior: Prior, budget_bytes: int | None
) -> Strategy:
    """The strategy that was asked for. Raises PlannerError where it needs what is not installed."""
    name = options.strategy
    if name == "planner":
        return PlannerStrategy(
            space, prior, budget_bytes, tolerance=options.tolerance, images=options.images
        )
    if name in WALKS:
        return WalkStrategy(WALKS[name](space, prior, budget_bytes, options.seed))
    from search.strategies.optuna_samplers import SamplerStrategy, make_sampler

    return SamplerStrategy(space, make_sampler(name, options.seed), budget_bytes)
