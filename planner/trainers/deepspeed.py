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

from planner.parallel.deepspeed_configuration import STAGES, configuration
from planner.schema import TrainSetting
from planner.trainers.accelerate import loop_notes, loss_lines
from planner.trainers.building import building_source
from planner.trainers.comments import WRITTEN_BY, one_line
from planner.trainers.engine import ZERO_PARALLEL, zero_notes
from planner.trainers.launch import launch
from planner.trainers.loader import train_loader
from planner.trainers.plan import IN_A_SCRIPT, Parallel, Plan, Trainer, Written
from planner.trainers.pretrained import build_call, fine_tuning_notes
from planner.trainers.recipe import learning_rate_note, recipe_of
from planner.trainers.source import compiles_whole, image_lines, literal

FILENAME = "ds_config.json"


def write(plan: Plan) -> Written:
    """`ds_config.json`, with `building.py` as code: build the optimizer and hand it over."""
    setting = plan.setting
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
    notes = (*_notes(setting), *machines, *fine_tuning_notes(plan.model, setting))
    about = [WRITTEN_BY + ".", *plan.heading, f"Run: {run}", *notes]
    values = {"comment": [one_line(line, 2000) for line in about], **configuration(setting)}
    code = building_source(plan, run, _script(plan), notes)
    return Written(json.dumps(values, indent=2) + "\n", run, notes, code)


_HOSTS = (
    "Run the line on one machine: it starts the others by ssh. HOSTFILE has a line 'NAME slots=N' "
    "for each of them, with its number of GPUs."
)


def _script(plan: Plan) -> tuple[str, ...]:
    """The lines of a script that trains with `building.py`."""
    setting, recipe = plan.setting, recipe_of(plan.setting)
    rate = "LEARNING_RATE" if recipe.learning_rate is not None else "LR"
    several = setting.parallelism != "none"
    shuffle = "sampler=sampler" if several else "shuffle=True"
    later = ", non_blocking=True" if train_loader(plan).pin_memory else ""
    config = literal(one_line(str(plan.output or FILENAME)))
    compiled = f"engine.compile(compile_kwargs={literal(setting.compile_arguments)})"
    return (
        *(_joined(plan) if several else ()),
        f"loader = DataLoader(data, {shuffle}, **LOADER)",
        f"model = {build_call(plan.model, setting)}",
        f"model = model.to({literal(plan.device)})  # before the optimizer takes its parameters",
        f"optimizer = build_optimizer(model, {rate})",
        "schedule = build_schedule(optimizer, steps)  # of the optimizer",
        "engine, *_ = deepspeed.initialize(",
        f"    model=model, optimizer=optimizer, lr_scheduler=schedule, config={config})",
        *((compiled,) if compiles_whole(setting) else ()),
        "for images, targets in loader:",
        f"    images = images.to(engine.device{later})",
        f"    targets = targets.to(engine.device{later})",
        *(("    images, targets = mix(images, targets)",) if recipe.mixes else ()),
        *(f"    {line}" for line in image_lines(setting)),
        *loss_lines(setting, "engine", "    engine.backward"),
        "    engine.step()",
    )


def _joined(plan: Plan) -> tuple[str, ...]:
    """Before a sampler can ask for its rank, and a model for the device of its own."""
    device = 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'
    return (
        *((device,) if plan.device == "cuda" else ()),
        "deepspeed.init_distributed()",
        "sampler = DistributedSampler(data)  # of torch.utils.data; set_epoch before each epoch",
    )


def _notes(setting: TrainSetting) -> tuple[str, ...]:
    found = [
        "Pass the optimizer of building.py to deepspeed.initialize(optimizer=…): the engine's own "
        '"AdamW" is another kernel.',
        learning_rate_note(setting),
        *zero_notes(setting),
    ]
    if setting.parallelism not in STAGES:
        found.append(
            "The engine copies all gradients into one flat tensor at each optimizer step, on one "
            "device too: it takes as many bytes as the parameters, after the activations are freed."
        )
    if setting.autocast_dtype is not None:
        found.append(
            "torch_autocast is what was probed; bf16.enabled or fp16.enabled would convert the "
            "model instead."
        )
    if setting.checkpointing != "none":
        found.append(
            "Its activation_checkpointing block does nothing for these models: "
            f"checkpointing={setting.checkpointing} is in building.py."
        )
    if setting.compile != "off":
        found.append(f"Compilation (mode {setting.compile}) is a call in building.py.")
    return (*found, *loop_notes(setting))


TRAINER = Trainer(
    name="deepspeed",
    title="DeepSpeed",
    filename=FILENAME,
    write=write,
    parallel={"ddp": Parallel(), **ZERO_PARALLEL},
    # In pure bf16 the engine would add fp32 masters of its own: another setting.
    expresses=(*IN_A_SCRIPT, "ema"),
)
