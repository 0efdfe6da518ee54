"""A plain PyTorch training script that runs: `python train.py DATA` or `--synthetic`.

Its step is that of `planner.training.step`, line for line what was probed; around it stand the
data, a warm-up and cosine schedule, validation and checkpoints. Only native models import the
planner.
"""

from __future__ import annotations

from typing import Any, get_args

from planner.core.schema.loading import PIPELINES
from planner.estimation.recipe import WORKERS, fine_tunes, fine_tuning, learning_rate_note
from planner.trainers.fine_tuning import trained_source
from planner.trainers.imports import import_block
from planner.trainers.launch import launch, nodes_notes, torchrun
from planner.trainers.loader import train_loader
from planner.trainers.parallel_source import (
    distribute_source,
    synchronised,
    without_twice,
)
from planner.trainers.plan import (
    DDP_OPTIONS,
    FSDP_OPTIONS,
    SYNC,
    LeverName,
    Parallel,
    Plan,
    Refusal,
    Trainer,
    Written,
)
from planner.trainers.pretrained import fine_tuning_notes, published_weights
from planner.trainers.script_data import (
    own_factory,
    pipeline_of,
    standard_modules,
)
from planner.trainers.source import image_lines, literal, offloaded, placed, process_source
from planner.trainers.steps import (
    mixing_source,
    optimizer_source,
    own_imports,
    schedule_source,
    step_constants,
    step_values,
)
from planner.trainers.task_script import task_refusals, write_task_script
from planner.trainers.templates import render

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
FILENAME = "train.py"


def write(plan: Plan) -> Written:
    """`train.py`, whole."""
    if plan.is_task:
        return write_task_script(plan, FILENAME)
    setting, recipe = plan.setting, plan.recipe
    script, factory = plan.path(FILENAME), own_factory(plan)
    rate = "" if recipe.learning_rate is not None else " --lr LR"
    weights = published_weights(plan.model)
    tunes = fine_tunes(setting)
    begun = " --pretrained" if weights is not None and tunes else ""
    data = "" if factory else "DATA"
    run = launch(plan, torchrun(script, plan, f"{data}{begun}{rate}".strip()))
    trial = launch(plan, torchrun(script, plan, f"--synthetic --steps 20{rate}"))
    tuning = fine_tuning_notes(plan.model, setting)
    notes = (learning_rate_note(setting, plan.model), *nodes_notes(setting), *tuning)
    layout = f"(data: {factory})" if factory else "(DATA/train/CLASS/*.jpg, DATA/val/CLASS/*.jpg)"
    model = trained_source(plan.model, setting, weights=weights)
    several, optimizer = distribute_source(setting), optimizer_source(plan)
    schedule, mixing = schedule_source(recipe), mixing_source(recipe)
    drawn = (*own_imports(setting), *(("import numpy",) if pipeline_of(plan) == "timm" else ()))
    head = plan.comment(run, layout, f" or: {trial}", notes=notes)
    pieces = (model, several, optimizer, schedule, mixing)
    imports = (line for piece in pieces for line in piece.imports)
    assert plan.model.image_size is not None
    loader = train_loader(plan)
    text = render(
        "train.py.j2",
        head=head + import_block((*imports, *drawn, *_IMPORTS), standard_modules(plan)),
        **step_values(plan),
        height=plan.model.image_size[0],
        width=plan.model.image_size[1],
        channels=plan.model.in_channels,
        num_classes=plan.model.num_classes,
        mean=MEAN,
        std=STD,
        constants="\n".join(step_constants(plan)) + "\n" + process_source(setting, plan.model),
        model=placed(without_twice(model.body, several.body), setting),
        distributed=several.body,
        mixing=mixing.body,
        offloaded=lambda lines: offloaded(lines, setting, "call", "images, targets").rstrip("\n"),
        synchronised=lambda lines: synchronised(setting, lines).rstrip("\n"),
        loads_weights=weights is not None,
        tuned=tuned_values(plan) if weights is not None and not tunes else None,
        pipeline=pipeline_of(plan),
        factory=factory,
        image_lines=image_lines(setting),
        loader=loader,
        workers=loader.workers
        if plan.loader is not None
        else f"min({WORKERS}, os.cpu_count() or 1)",
        task=False,
        unit="images",
        batch="images, targets",
        forward_arguments="call, images, targets",
    )
    return Written(text, run, notes)


def tuned_values(plan: Plan) -> str:
    """What `--pretrained` sets of the script's options."""
    recipe = fine_tuning(plan.recipe)
    values: dict[str, Any] = {"epochs": recipe.epochs, "warmup_epochs": recipe.warmup_epochs}
    if recipe.learning_rate is not None:
        values["lr"] = recipe.learning_rate
    if recipe.weight_decay:
        values["weight_decay"] = recipe.weight_decay
    return literal(values)


def refusals(plan: Plan) -> list[Refusal]:
    """Everything of a setting is written out; a task has one device."""
    return task_refusals(plan) if plan.is_task else []


_IMPORTS = (
    "from collections.abc import Iterator",
    "from contextlib import nullcontext",
    "from typing import Any",
    "import torch",
    "from torch import Tensor, nn",
    "from torch.nn import functional as F",
    "from pathlib import Path",
    "from torch.utils.data import DataLoader, Dataset, Sampler",
)


TRAINER = Trainer(
    name="pytorch",
    title="the PyTorch script",
    filename=FILENAME,
    write=write,
    expresses=get_args(LeverName),
    refusals=refusals,
    pipelines=PIPELINES,
    parallel={
        "ddp": Parallel(DDP_OPTIONS | SYNC),
        "fsdp": Parallel(FSDP_OPTIONS | SYNC),
        "hsdp": Parallel(FSDP_OPTIONS | SYNC | {"fsdp_shard_size"}),
    },
)
