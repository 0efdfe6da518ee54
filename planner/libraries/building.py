"""What makes the real module of any model. Needs torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from planner.core.schema import FactoryModel, Model, NamedModel, TrainSetting
from planner.libraries.factory import load_factory
from planner.libraries.missing_operators import declare_missing_operators
from planner.libraries.named import build_named
from planner.libraries.registry import find_library

Build = Callable[[], Any]
"""Makes a module, or whatever else a user's factory returns (`planner.training.tasks.as_task`)."""


def build_for(model: Model, setting: TrainSetting) -> Build:
    """What makes the module of `model`: its library, or the user's factory, which may make a task.

    Raises UsageError or PlannerError, and so does calling the result.
    """
    if isinstance(model, FactoryModel):
        declare_missing_operators()  # of torchvision, which the factory may import
        return load_factory(model.factory)
    if isinstance(model, NamedModel):
        return partial(build_named, model, setting.attention)
    spec = find_library(model.library)
    return partial(spec.build, model, spec.resolve(model, setting))
