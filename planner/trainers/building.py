"""`building.py`: what a script of the user's own takes from the planner, where one is needed.

Model, optimizer, schedule, loss and the numbers of the setting, so that nothing of it is left to
be read from a message.
"""

from __future__ import annotations

from planner.trainers.copies import sections
from planner.trainers.fine_tuning import trained_source
from planner.trainers.imports import import_block
from planner.trainers.plan import Plan
from planner.trainers.recipe import recipe_of
from planner.trainers.source import placed, process_source
from planner.trainers.steps import loader_source, rate_source, step_source

FILENAME = "building.py"


def building_source(
    plan: Plan, run: str, use: tuple[str, ...], notes: tuple[str, ...], more: str = ""
) -> str:
    """The module. `use` are the lines of a script that trains with it, said at its head; `more` are
    further constants."""
    setting, recipe = plan.setting, recipe_of(plan.setting)
    model = trained_source(plan.model, setting)
    step = step_source(setting)
    constants = [
        f"ACCUMULATE = {setting.accumulate}  # micro-batches of one optimizer step\n",
        f"VALIDATION_BATCH_SIZE = {recipe.validation_batch_size}\n",
        f"NUM_CLASSES = {plan.model.num_classes}\n",
        rate_source(setting),
        f"CLIP_NORM = {recipe.clip_norm}\n" if recipe.clip_norm is not None else "",
        loader_source(plan),
        more,
    ]
    said = plan.comment(run, "Your script:", *(f"    {line}" for line in use), notes=notes)
    imports = import_block((*model.imports, *step.imports))
    head = f"{said}{imports}\n{process_source(setting)}\n{''.join(constants)}"
    return sections(head, placed(model.body, setting), step.body)
