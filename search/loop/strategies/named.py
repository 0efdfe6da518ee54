"""Strategies by the names that `--strategy` takes."""

from __future__ import annotations

from search.loop.strategies.in_order import ListStrategy
from search.loop.strategies.planner_strategy import PlannerStrategy
from search.loop.strategies.strategy import Strategy
from search.loop.surrogate.posterior import Posterior

STRATEGIES = ("planner", "tpe", "exhaustive")


def make_strategy(name: str, posterior: Posterior, tolerance: float, seed: int) -> Strategy:
    """The strategy of `STRATEGIES` that is called `name`; `tolerance` is the planner's, `seed` is
    of the one that draws at random."""
    if name == "planner":
        return PlannerStrategy(posterior, tolerance)
    if name == "exhaustive":
        return ListStrategy(posterior.space.candidates)
    from search.loop.strategies.optuna_sampler import SamplerStrategy, tpe_sampler

    return SamplerStrategy(posterior.space, tpe_sampler(seed), posterior.budget_bytes)
