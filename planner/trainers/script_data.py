"""How the plain script reads its data: the measured pipeline, and the way of a batch to the device.

The script's part of it is `templates/data.j2`. Training draws from
a sampler without end, so that no worker runs dry between two epochs; batches are copied to a CUDA
device on a stream of their own, and nothing waits for the device between two lines of the log.
"""

from __future__ import annotations

from planner.core.schema.loading import Pipeline
from planner.trainers.loader import train_loader
from planner.trainers.plan import Plan

SCRIPT_MODULES = ("argparse", "json", "math", "os", "random", "time")


def standard_modules(plan: Plan) -> tuple[str, ...]:
    """What is imported of the standard library."""
    found = {"timm": ("functools",), "own": ("sys",)}
    return (*SCRIPT_MODULES, "itertools", *found.get(pipeline_of(plan), ()))


def pipeline_of(plan: Plan) -> Pipeline:
    """What runs in the script's loader."""
    return train_loader(plan).pipeline


def own_factory(plan: Plan) -> str | None:
    """MODULE:FACTORY of the user's Dataset, None where the script reads a folder of pictures."""
    if plan.fed is None or not plan.fed.is_factory:
        return None
    return plan.fed.location
