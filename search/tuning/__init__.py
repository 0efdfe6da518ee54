"""From what a person asked to a recommendation. Importing it raises PlannerError where Optuna is
missing, as where planner was installed without its dependencies."""

import importlib.util

from planner.core.errors import PlannerError

if importlib.util.find_spec("optuna") is None:
    raise PlannerError("a search needs optuna, which is not installed.", "pip install optuna torch")
