"""What a user's factory makes, asked in a process of its own: `task` or `module`.

Built without data (torch's meta device): no kernel runs.
"""

from __future__ import annotations

import json
import sys

import torch

from planner.core.schema import FactoryModel, TrainSetting
from planner.training.tasks import task_for
from planner.training.tasks.making import GivenTask


def main() -> None:
    model = FactoryModel.model_validate_json(sys.argv[1])
    with torch.device("meta"):
        task = task_for(model, TrainSetting())
    print(json.dumps({"makes": "task" if isinstance(task, GivenTask) else "module"}))


if __name__ == "__main__":
    main()
