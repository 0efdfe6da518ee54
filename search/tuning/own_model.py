"""What a user's factory makes, asked in a process of its own: torch and the user's code are
imported there."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

from planner.core.errors import PlannerError, UnsupportedError
from planner.core.schema import FactoryModel, TrainSetting
from planner.core.schema.setting import OWN_OPTIMIZER
from search.loop.space import Restriction
from search.probe.device import ask_process

# In which a factory is asked what it makes: torch has to be imported for it. A judgement.
_ASK_SECONDS = 90.0


@dataclass(frozen=True)
class Made:
    """`is_task`: it makes batches of its own, and is no module that takes images."""

    is_task: bool = False
    has_optimizer: bool = False


def ask_factory(model: FactoryModel) -> Made | None:
    """What it makes, without its module; None where that cannot be told. Raises PlannerError where
    it makes neither a module nor a whole task, or its file cannot be imported."""
    arguments = ["-m", "search.tuning.own_model", model.model_dump_json()]
    found = ask_process(arguments, _ASK_SECONDS)
    if found is None:
        return None
    if "error" in found:
        raise PlannerError(*found["error"])
    return Made(**found)


def with_own_optimizer(base: TrainSetting, restrict: Restriction, title: str) -> TrainSetting:
    """`base` of a task that makes its optimizer. Raises UnsupportedError where another is asked."""
    asked = [str(v) for v in restrict.get("optimizer", (base.optimizer,))]
    if other := [v for v in asked if v not in ("adamw", OWN_OPTIMIZER)]:
        raise UnsupportedError(
            f"{title} makes its own optimizer, and not {other[0]}.",
            "Omit --optimizer, or take optimizer() out of the task.",
        )
    return base.model_copy(update={"optimizer": OWN_OPTIMIZER})


def main() -> None:
    """Built without data (torch's meta device): no kernel runs."""
    import torch

    from planner.libraries.building import build_for
    from planner.training.tasks import as_task
    from planner.training.tasks.making import GivenTask

    model = FactoryModel.model_validate_json(sys.argv[1])
    try:
        build = build_for(model, TrainSetting())
    except PlannerError as error:
        print(json.dumps({"error": [error.message, error.way_out]}))
        return
    with torch.device("meta"):
        built = build()
    try:
        task = as_task(built, model, TrainSetting())
    except PlannerError as error:
        print(json.dumps({"error": [error.message, error.way_out]}))
        return
    print(json.dumps(asdict(Made(isinstance(task, GivenTask), hasattr(task, "optimizer")))))


if __name__ == "__main__":
    main()
