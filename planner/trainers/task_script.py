"""A plain PyTorch script for a task: `python train.py --steps N`, on the batches of your loader.

Its step is that of `planner.training.step`, on the module, the batch and the loss of the task. It
trains on random or repeated batches until your own loader stands in its one marked place.
"""

from __future__ import annotations

import re

from planner.core.schema import NamedModel
from planner.core.schema.figures import UNIT
from planner.core.schema.setting import OWN_OPTIMIZER
from planner.trainers.imports import import_block
from planner.trainers.launch import launch, torchrun
from planner.trainers.loader import training_load
from planner.trainers.plan import Plan, Refusal, Written
from planner.trainers.script_data import SCRIPT_MODULES
from planner.trainers.source import BUDGET_IMPORT, literal, mapping, offloaded, process_source
from planner.trainers.steps import (
    optimizer_source,
    own_imports,
    schedule_source,
    step_constants,
    step_values,
)
from planner.trainers.templates import render

RATE_NOTE = (
    "No learning rate is published for your model: set yours with --lr (a task that makes its own "
    "optimizer keeps its own)."
)


def write_task_script(plan: Plan, filename: str) -> Written:
    """`filename`, whole."""
    setting = plan.setting
    is_own = setting.optimizer == OWN_OPTIMIZER
    notes = () if is_own else (RATE_NOTE,)
    arguments = "--steps 20" if is_own else "--steps 20 --lr LR"
    run = launch(plan, torchrun(plan.path(filename), plan, arguments))
    optimizer, schedule = optimizer_source(plan), schedule_source(plan.recipe)
    imports = (*_imports(plan), *optimizer.imports, *schedule.imports, *own_imports(setting))
    head = plan.comment(run, "Your loader goes into batches_of().", notes=notes)
    unit = plan.unit if plan.unit and re.fullmatch(UNIT, plan.unit) else "items"
    text = render(
        "task.py.j2",
        head=head + import_block(imports, SCRIPT_MODULES),
        **step_values(plan),
        constants=f"{_constants(plan, unit)}{process_source(setting, plan.model)}".rstrip("\n"),
        model="",
        distributed="",
        unit=unit,
        loads=plan.loader is not None,
        offloaded=lambda lines: offloaded(lines, setting, "call", "*tensors_of(batch)").rstrip(
            "\n"
        ),
        synchronised=lambda lines: lines.rstrip("\n"),
        loads_weights=False,
        tuned=None,
        task=True,
        batch="batch",
        forward_arguments="task, call, batch",
    )
    return Written(text, run, notes)


def task_refusals(plan: Plan) -> list[Refusal]:
    """One device only: how a task's module is called in parallel is the task's own matter."""
    if plan.setting.world_size == 1:
        return []
    return [
        Refusal(
            f"the script of a task trains on one device, not on {plan.setting.world_size}",
            "Emit with --set world_size=1, and wrap the module in DistributedDataParallel.",
        )
    ]


_IMPORTS = (
    "from collections.abc import Iterator",
    "from contextlib import nullcontext",
    "from pathlib import Path",
    "from typing import Any",
    "import torch",
    "from torch import Tensor, nn",
    "from planner.training.tasks import Task, task_for",
    "from planner.training.tasks.trees import prepare",
    "from planner.training.step import lay_out",
)


def _imports(plan: Plan) -> tuple[str, ...]:
    found = [
        *_IMPORTS,
        f"from planner.core.schema import {type(plan.model).__name__}, TrainSetting",
    ]
    if plan.setting.checkpointing != "none":
        found.append("from planner.training.tasks.blocks import checkpoint_as_set")
    if plan.setting.offload != "none":
        found += [
            "from planner.training.offloading import offload_activations",
            "from planner.training.tasks.trees import tensors_of",
        ]
    if plan.setting.activation_memory_budget < 1:
        found.append(BUDGET_IMPORT)
    if plan.setting.compile_scope == "blocks":
        found.append("from planner.training.tasks.compiling import compile_as_set")
    return tuple(found)


def _constants(plan: Plan, unit: str) -> str:
    model, setting = plan.model, plan.setting
    of_model = model.model_dump(mode="json", exclude_none=True)
    if not isinstance(model, NamedModel):
        of_model = model.model_dump(mode="json", exclude_defaults=True)
    of_setting = setting.model_dump(mode="json", exclude_defaults=True)
    lines = [
        _call(f"MODEL = {type(model).__name__}", of_model),
        _call("SETTING = TrainSetting", of_setting),
        f"BATCH_SIZE = {setting.batch_size}  # {unit} of one micro-batch",
        f"ACCUMULATE = {setting.accumulate}  # micro-batches of one optimizer step",
        *step_constants(plan),
    ]
    loader = mapping("LOADER", training_load(plan)) if plan.loader is not None else ""
    return "\n".join(lines) + f"\n{loader}"


def _call(name: str, fields: dict[str, object]) -> str:
    lines = "".join(f"    {field}={literal(value)},\n" for field, value in fields.items())
    return f"{name}(\n{lines})" if lines else f"{name}()"
