"""accelerate: the YAML of `accelerate launch --config_file`, and what belongs in your script.

Keys are the fields of ClusterConfig in accelerate 1.15, commands/config/config_args.py. There is
none for loading data: the script makes the DataLoader, and DataLoaderConfiguration holds what
`prepare` adds to it (utils/dataclasses.py). There is none for accumulation either, and
`--gradient_accumulation_steps` of `accelerate launch` reaches only DeepSpeed: it is an argument of
`Accelerator`, or ACCELERATE_GRADIENT_ACCUMULATION_STEPS in the environment (utils/launch.py,
accelerator.py).
"""

from __future__ import annotations

from typing import Any

import yaml

from planner.schema import TrainSetting
from planner.trainers.building import FILENAME as CODE_FILENAME
from planner.trainers.building import building_source
from planner.trainers.launch import launch
from planner.trainers.loader import train_loader
from planner.trainers.plan import COMPILING, Emitted, Plan, Trainer
from planner.trainers.pretrained import build_call, fine_tuning_notes
from planner.trainers.recipe import learning_rate_note, recipe_of
from planner.trainers.source import compiles_whole, image_lines, offloaded

TITLE = "accelerate"
FILENAME = "accelerate.yaml"


def write(plan: Plan) -> Emitted:
    """`accelerate.yaml`, with `building.py` as code."""
    setting = plan.setting
    command = f"accelerate launch --config_file {plan.path(FILENAME)} your_script.py"
    variables = {}
    if setting.accumulate > 1:
        variables["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(setting.accumulate)
    run = launch(plan, command, variables)
    tuning = fine_tuning_notes(plan.model, setting)
    notes = (learning_rate_note(setting), *loop_notes(setting), *tuning)
    more = f"The model, the optimizer and what your script does with them: {CODE_FILENAME}."
    return Emitted(
        target="accelerate",
        filename=FILENAME,
        text=plan.comment(run, more, notes=notes) + yaml.safe_dump(_values(plan), sort_keys=False),
        launch=run,
        warnings=(*plan.warnings, *notes),
        code=building_source(plan, run, _script(plan), notes),
        code_filename=CODE_FILENAME,
    )


def _values(plan: Plan) -> dict[str, Any]:
    setting, cpu = plan.setting, plan.device == "cpu"
    several = "MULTI_CPU" if cpu else "MULTI_GPU"
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": several if setting.world_size > 1 else "NO",
        "num_machines": 1,
        "num_processes": setting.world_size,
        "mixed_precision": setting.precision if setting.autocast_dtype else "no",
        "use_cpu": cpu,
    }
    if compiles_whole(setting):  # blocks: in building.py
        values["dynamo_config"] = {
            "dynamo_backend": "INDUCTOR",
            "dynamo_mode": setting.compile,
            "dynamo_use_dynamic": setting.compile_dynamic,
            "dynamo_use_fullgraph": setting.compile_fullgraph,
        }
    return values


def _script(plan: Plan) -> tuple[str, ...]:
    """The lines of a script that trains with `building.py`."""
    setting, recipe = plan.setting, recipe_of(plan.setting)
    rate = "LEARNING_RATE" if recipe.learning_rate is not None else "LR"
    built, stepped = _stepping(setting)
    clip = (
        "        if accelerator.sync_gradients:",
        "            accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)",
    )
    return (
        "loader = DataLoader(data, shuffle=True, **LOADER)",
        "# DataLoaderConfiguration is in accelerate.utils.",
        f"loading = DataLoaderConfiguration(non_blocking={train_loader(plan).pin_memory})",
        "accelerator = Accelerator(",
        "    gradient_accumulation_steps=ACCUMULATE, dataloader_config=loading)",
        f"model = {build_call(plan.model, setting)}.to(accelerator.device)",
        *(line.replace("RATE", rate) for line in built),
        "for images, targets in loader:",
        *(("    images, targets = mix(images, targets)",) if recipe.mixes else ()),
        *(f"    {line}" for line in image_lines(setting)),
        "    with accelerator.accumulate(model):",
        *loss_lines(setting, "model", "        accelerator.backward"),
        *(clip if recipe.clip_norm is not None else ()),
        *stepped,
    )


def _stepping(setting: TrainSetting) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The lines that build the optimizer of rate RATE and its schedule, and those that step both;
    in backward each weight has its own, and `accelerator` knows of none."""
    if setting.optimizer_in_backward:
        return (
            "optimizers = build_optimizers(model, RATE)  # keep them: backward steps each",
            "schedules = [build_schedule(optimizer, steps) for optimizer in optimizers]",
            "model, loader = accelerator.prepare(model, loader)",
        ), ("        for schedule in schedules:", "            schedule.step()")
    return (
        "optimizer = build_optimizer(model, RATE)",
        "schedule = build_schedule(optimizer, steps)  # of the optimizer, on one device",
        "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
    ), (
        "        optimizer.step()",
        f"        optimizer.zero_grad(set_to_none={setting.zero_grad_to_none})",
        "        if accelerator.sync_gradients:",
        "            schedule.step()",
    )


def loss_lines(setting: TrainSetting, model: str, backward: str) -> tuple[str, ...]:
    """The forward of a loop and its backward, which `backward` calls (as far in as it is written).
    What is called in the model's place is `model`."""
    margin = " " * (len(backward) - len(backward.lstrip()))
    loss = f"training_loss({model}(images), targets)"
    if setting.offload == "none":
        return (f"{backward}({loss})",)
    forward = offloaded(f"{margin}loss = {loss}\n", setting, model, "images, targets")
    return (*forward.splitlines(), f"{backward}(loss)")


def loop_notes(setting: TrainSetting) -> tuple[str, ...]:
    """What the setting asks of a script that the file does not write out."""
    found = []
    if setting.ema:
        found.append("Keep an average of the weights in your loop (ema), as the probe did.")
    if setting.validation_batch_size:
        found.append(
            f"Validate with batches of {setting.validation_batch_size} images "
            "(VALIDATION_BATCH_SIZE), as probed."
        )
    return tuple(found)


TRAINER = Trainer(
    name="accelerate",
    title=TITLE,
    filename=FILENAME,
    write=write,
    # Pure bf16 and gradients that stay are up to the script's own loop, which the file shows.
    expresses=(
        *COMPILING, "checkpointing-in-parts", "offload", "optimizer_in_backward",
        "zero_grad_to_none", "frozen_stages", "lora_rank", "ema", "memory_format", "pure-bf16",
        "bf16-on-cpu",
    ),
)  # fmt: skip
