"""DeepSpeed: `ds_config.json` for `deepspeed.initialize(config=…)`.

Keys as in DeepSpeed 0.19, runtime/constants.py and runtime/config.py. Autocast is the block
`torch_autocast` (with fp16 and without ZeRO the engine keeps a GradScaler); `bf16.enabled` and
`fp16.enabled` convert the model instead, which is another setting. Gradients are clipped at 1.0
unless told. Its `activation_checkpointing` block does nothing for these models: checkpointing is in
the model, and so in `building.py`. Without ZeRO it reduces gradients in one flat copy, on one
device too (runtime/engine.py, allreduce_bucket). Its own loader (`training_data`) has twice as many
workers as devices and no key for another number: the script makes the DataLoader
(runtime/dataloader.py).
"""

from __future__ import annotations

import json
from dataclasses import replace

from planner.core.schema import TrainSetting
from planner.core.units import format_bytes
from planner.estimation.recipe import learning_rate_note
from planner.trainers.building import building_source, forward_source
from planner.trainers.comments import WRITTEN_BY, one_line
from planner.trainers.engine import ZERO_PARALLEL, zero_notes
from planner.trainers.launch import launch
from planner.trainers.loader import train_loader
from planner.trainers.plan import IN_A_SCRIPT, Parallel, Plan, Trainer, Written
from planner.trainers.pretrained import build_call, fine_tuning_notes
from planner.trainers.source import compiles_whole, image_lines, literal
from planner.trainers.steps import offloads
from planner.trainers.templates import render
from planner.training.parallel.deepspeed_configuration import BUCKET_ELEMENTS, STAGES, configuration

FILENAME = "ds_config.json"


def write(plan: Plan) -> Written:
    """`ds_config.json`, with `building.py` as code: build the optimizer and hand it over."""
    setting = _as_engine(plan)
    if setting is not plan.setting:  # the engine moves the optimizer that it is given
        on_device = plan.setting.model_copy(update={"offload_optimizer": "none"})
        plan = replace(plan, setting=on_device)
    cpu = plan.device == "cpu"
    count = "--num_accelerators" if cpu else "--num_gpus"
    several = setting.nodes > 1
    hosts = f"--hostfile HOSTFILE --num_nodes {setting.nodes} " if several else ""
    run = launch(
        plan,
        f"deepspeed {hosts}{count} {setting.devices_per_node} your_script.py",
        {"DS_ACCELERATOR": "cpu"} if cpu else None,
    )
    machines = (_HOSTS,) if several else ()
    notes = (
        *_notes(replace(plan, setting=setting)),
        *machines,
        *fine_tuning_notes(plan.model, setting),
    )
    about = [WRITTEN_BY + ".", *plan.heading, f"Run: {run}", *notes]
    values = {"comment": [one_line(line, 2000) for line in about], **configuration(setting)}
    code = building_source(plan, run, _script(plan), notes)
    return Written(json.dumps(values, indent=2) + "\n", run, notes, code)


_HOSTS = (
    "Run the line on one machine: it starts the others by ssh. HOSTFILE has a line 'NAME slots=N' "
    "for each of them, with its number of GPUs."
)


def _on_host_note(setting: TrainSetting) -> str:
    """A bucket for each dtype in which gradients cross; a buffer of the largest weight, and its
    gradient in fp64 for the norm (`temp_grad_buffer_for_gpu_offload`, `get_norm_dtype`)."""
    buckets = 1 + (setting.autocast_dtype is not None)
    taken = format_bytes(buckets * 4 * BUCKET_ELEMENTS)
    return (
        "DeepSpeed moves the optimizer to the host (ZeRO-Offload), where torchao's was "
        f"counted: on the device lie {taken} of buckets besides, and up to three times the largest "
        "weight. deepspeed.ops.adam.DeepSpeedCPUAdam is its own AdamW for the host, "
        "which it compiles."
    )


def _as_engine(plan: Plan) -> TrainSetting:
    """With an optimizer on the host of a GPU, the stage of one device that keeps it there
    (ZeRO-Offload): the second frees gradients as backward goes."""
    setting = plan.setting
    if not offloads(plan):
        return setting
    stage = "zero1" if setting.offload_optimizer == "state" else "zero2"
    return setting.model_copy(update={"parallelism": stage})


def _script(plan: Plan) -> str:
    """The script that trains with `building.py`."""
    setting = plan.setting
    compiled = f"engine.compile(compile_kwargs={literal(setting.compile_arguments)})"
    return render(
        "deepspeed.j2",
        setting=setting,
        recipe=plan.recipe,
        rate=plan.recipe.learning_rate,
        cuda=plan.device == "cuda",
        device=literal(plan.device),
        later=", non_blocking=True" if train_loader(plan).pin_memory else "",
        config=literal(one_line(str(plan.output or FILENAME))),
        compiled=compiled if compiles_whole(setting) else "",
        build=build_call(plan.model, setting),
        image_lines=image_lines(setting),
        forward=forward_source(setting, "engine", " " * 12),
    )


def _notes(plan: Plan) -> tuple[str, ...]:
    setting, on_host = plan.setting, offloads(plan)
    found = [
        "Pass the optimizer of building.py to deepspeed.initialize(optimizer=…): the engine's own "
        '"AdamW" is another kernel.',
        learning_rate_note(setting, plan.model),
        *(() if on_host else zero_notes(setting)),
    ]
    if setting.parallelism not in STAGES:
        found.append(
            "The engine copies all gradients into one flat tensor at each optimizer step, on one "
            "device too: it takes as many bytes as the parameters, after the activations are freed."
        )
    if on_host:
        found.append(_on_host_note(setting))
    if setting.autocast_dtype is not None:
        found.append(
            "torch_autocast is what planner's step has; bf16.enabled or fp16.enabled would convert "
            "the model instead."
        )
    if setting.checkpointing != "none":
        found.append(
            "Its activation_checkpointing block does nothing for these models: "
            f"checkpointing={setting.checkpointing} is in building.py."
        )
    if setting.compile != "off":
        found.append(f"Compilation (mode {setting.compile}) is a call in building.py.")
    return tuple(found)


TRAINER = Trainer(
    name="deepspeed",
    title="DeepSpeed",
    filename=FILENAME,
    write=write,
    parallel={"ddp": Parallel(), **ZERO_PARALLEL},
    # In pure bf16 the engine would add fp32 masters of its own: another setting.
    expresses=(*IN_A_SCRIPT, "ema", "offload_optimizer"),
)
