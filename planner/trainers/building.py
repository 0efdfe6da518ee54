"""`building.py`: what a script of the user's own takes from the planner, where one is needed.

Model, optimizer, schedule, loss and the numbers of the setting, so that nothing of it is left to
be read from a message.
"""

from __future__ import annotations

from planner.core.schema import TrainSetting
from planner.core.schema.setting import EMA_DECAY
from planner.trainers.copies import sections
from planner.trainers.fine_tuning import trained_source
from planner.trainers.imports import import_block
from planner.trainers.plan import Plan
from planner.trainers.source import offloaded, placed, process_source
from planner.trainers.steps import loader_source, rate_source, step_source

FILENAME = "building.py"


def building_source(
    plan: Plan, run: str, script: str, notes: tuple[str, ...], more: str = ""
) -> str:
    """The module. `script` is one that trains with it, shown at its head; `more` are further
    constants."""
    setting, recipe = plan.setting, plan.recipe
    model = trained_source(plan.model, setting)
    step = step_source(plan)
    constants = [
        f"ACCUMULATE = {setting.accumulate}  # micro-batches of one optimizer step\n",
        f"VALIDATION_BATCH_SIZE = {recipe.validation_batch_size}\n",
        f"NUM_CLASSES = {plan.model.num_classes}\n",
        f"EPOCHS = {recipe.epochs}\n",
        rate_source(plan),
        f"CLIP_NORM = {recipe.clip_norm}\n" if recipe.clip_norm is not None else "",
        f"EMA_DECAY = {EMA_DECAY}\n" if setting.ema else "",
        loader_source(plan),
        more,
    ]
    said = plan.comment(run, *shown(script), notes=notes)
    imports = import_block((*model.imports, *step.imports))
    head = f"{said}{imports}\n{process_source(setting, plan.model)}\n{''.join(constants)}"
    return sections(head, placed(model.body, setting), step.body)


def shown(script: str, why: str = "") -> tuple[str, ...]:
    """The lines of a comment that show a whole script of the user's."""
    title = f"Your script{', ' + why if why else ''}:"
    return (title, *(f"    {line}" for line in script.splitlines()))


def forward_source(setting: TrainSetting, model: str, margin: str) -> str:
    """The lines of a script, as far in as `margin`, that call `model` for its `loss`."""
    line = f"{margin}loss = training_loss({model}(images), targets)\n"
    return offloaded(line, setting, model, "images, targets").rstrip("\n")
