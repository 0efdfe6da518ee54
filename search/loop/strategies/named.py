"""Strategies by the names that `--strategy` takes."""

from __future__ import annotations

from search.loop.space import Space
from search.loop.strategies.in_order import ListStrategy
from search.loop.strategies.planner_strategy import PlannerStrategy
from search.loop.strategies.strategy import Strategy
from search.loop.surrogate.prior import Prior

STRATEGIES = ("planner", "tpe", "exhaustive")


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
    planner's, `seed` is of the one that draws at random."""
    if name == "planner":
        return PlannerStrategy(space, prior, budget_bytes, tolerance=tolerance, images=images)
    if name == "exhaustive":
        return ListStrategy(space.candidates)
    from search.loop.strategies.optuna_sampler import SamplerStrategy, tpe_sampler

    return SamplerStrategy(space, tpe_sampler(seed), budget_bytes)
