"""All trainers, and the files of those that run `train.py`: `train.py` itself, and beside it, for
another trainer, `train_NAME.py`, which runs the same step in that trainer's loop.

Only the block at the top of `train.py` differs from the shipped files. To add a trainer, write a
`Trainer` and add it to `TRAINERS`.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial

from planner.core.errors import Fault, unknown_name
from planner.core.schema import SwinConfig, TrainSetting
from planner.core.schema.setting import DEEPSPEED, OWN_OPTIMIZER, SHARDED
from planner.trainers.block import dataset_factory, fill_block, published_weights
from planner.trainers.faults import IN_THE_LOOP
from planner.trainers.launch import launch_line, node_notes, torchrun_line
from planner.trainers.microsoft import TRAINER as MICROSOFT
from planner.trainers.plan import WRITTEN_BY, Plan, Support, Trainer, Written, list_faults
from planner.trainers.recipe import is_fine_tuning, learning_rate_note
from planner.trainers.timm import TRAINER as TIMM
from planner.training.setting import FOLDER, configuration

CONFIGURATION = "ds_config.json"
_NATIVE = FOLDER.with_name("libraries") / "native"
TASK_NOTE = (
    "Your loader goes into task_batches(). No learning rate is published for your model: set yours "
    "with --lr (a task that makes its own optimizer keeps its own)."
)
RECIPE_NOTE = (
    "The recipe is the authors' from the weights of ImageNet-22k, for all of a model: 2e-5 for 512 "
    "images, 30 epochs with 5 of warm-up, a weight decay of 1e-8 (microsoft/Swin-Transformer "
    "@f0ca48c, configs/swin/swin_base_patch4_window7_224_22kto1k_finetune.yaml). Adapters and few "
    "stages often take a larger rate."
)


def write_script(name: str, plan: Plan) -> Written:
    """The files of a plan whose file `name` is started by torchrun."""
    script = plan.path(name)
    return _script_files(plan, name, lambda arguments: torchrun_line(script, plan, arguments))


def write_accelerate(plan: Plan) -> Written:
    setting, name = plan.setting, "train_accelerate.py"
    # On CPUs accelerate's launcher starts one process only, except by MPI.
    if plan.device == "cpu" and setting.world_size > 1:
        return write_script(name, plan)
    options = "--cpu " if plan.device == "cpu" else "--multi_gpu " if setting.world_size > 1 else ""
    options += f"--num_processes {setting.world_size} --num_machines {setting.nodes}"
    if setting.nodes > 1:
        options += " --machine_rank RANK --main_process_ip HOST --main_process_port 29500"
    options += " --mixed_precision no --dynamo_backend no"
    command = f"accelerate launch {options} {plan.path(name)}"
    return _script_files(plan, name, lambda arguments: f"{command} {arguments}")


def write_deepspeed(plan: Plan) -> Written:
    setting, name = plan.setting, "train_deepspeed.py"
    hosts = f"--hostfile HOSTFILE --num_nodes {setting.nodes} " if setting.nodes > 1 else ""
    count = "--num_accelerators" if plan.device == "cpu" else "--num_gpus"
    command = (
        f"deepspeed --no_local_rank {hosts}{count} {setting.devices_per_node} {plan.path(name)}"
    )
    variables = {"DS_ACCELERATOR": "cpu"} if plan.device == "cpu" else {}
    written = _script_files(plan, name, lambda arguments: f"{command} {arguments}", variables)
    values = {"comment": f"{WRITTEN_BY}. Run: {written.command}", **configuration(setting)}
    written.modules[CONFIGURATION] = json.dumps(values, indent=2) + "\n"
    return written


def _script_files(
    plan: Plan, name: str, command: Callable[[str], str],
    variables: Mapping[str, str] | None = None,
) -> Written:  # fmt: skip
    """The files of `plan`: the file `name`, and those beside it. `command` makes the command that
    starts it, of its arguments; `variables` are its environment."""
    setting = plan.setting
    arguments = ["--steps 20"] if plan.is_task else [] if dataset_factory(plan) else ["DATA"]
    if is_fine_tuning(setting) and published_weights(plan.model) is not None:
        arguments.append("--pretrained")
    if plan.recipe.learning_rate is None and setting.optimizer != OWN_OPTIMIZER:
        arguments.append("--lr LR")
    line = launch_line(plan, command(" ".join(arguments)), variables)
    notes = _notes(plan)
    text = fill_block(plan, plan.comment(line, notes=notes))
    modules = {"train.py": text, "pictures.py": (FOLDER / "pictures.py").read_text("utf-8")}
    if plan.is_task:
        del modules["pictures.py"]
    if needs_levers(setting):
        modules["levers.py"] = (FOLDER / "levers.py").read_text("utf-8")
    if isinstance(plan.model, SwinConfig) and plan.model.library == "native":
        modules["native_swin.py"] = (_NATIVE / "native_swin.py").read_text("utf-8")
    if name != "train.py":
        modules[name] = (FOLDER / name).read_text("utf-8")
    return Written(modules.pop(name), line, notes, modules)


def needs_levers(setting: TrainSetting) -> bool:
    """Whether `train.py` imports `levers.py` for this setting."""
    return (
        setting.checkpointing != "none"
        or setting.offload != "none"
        or setting.precision == "fp8"
        or setting.memory_format != "contiguous"
        or setting.compile_scope != "model"
        or setting.parallelism in SHARDED
        or is_fine_tuning(setting)
    )


def _notes(plan: Plan) -> tuple[str, ...]:
    setting, model = plan.setting, plan.model
    if plan.is_task:
        return () if setting.optimizer == OWN_OPTIMIZER else (TASK_NOTE,)
    notes = [learning_rate_note(setting, model), *node_notes(setting)]
    if is_fine_tuning(setting):
        notes.append(RECIPE_NOTE)
        if published_weights(model) is None:
            notes.append(
                f"{model.title} has no published weights under a name that its library loads: load "
                "yours in build_model(), before what is frozen, or it stays random."
            )
    if setting.parallelism in DEEPSPEED:
        notes.append(
            "Buckets hold 25 MiB of fp32, as DDP's. DeepSpeed's own are of 500,000,000 elements: "
            "1 GB in 16 bits, 2 GB in fp32, whatever the model."
        )
    return tuple(notes)


def task_faults(plan: Plan) -> list[Fault]:
    """Refuses several devices: only the task itself knows how its module is called in parallel."""
    law = f"the script of a task trains on one device, not on {plan.setting.world_size}"
    change = "Emit with --set world_size=1, and wrap the module in DistributedDataParallel."
    is_spread = plan.is_task and plan.setting.world_size > 1
    return [Fault(law, way_out=change)] if is_spread else []


def _lightning_faults(plan: Plan) -> list[Fault]:
    """Lightning clips no gradients of a fused optimizer in fp16 (plugins/precision/amp.py)."""
    setting = plan.setting
    is_fused = setting.optimizer_implementation == "fused"
    is_fault = setting.clip_grad and is_fused and setting.precision == "fp16"
    law = f"it does not clip the gradients of a fused optimizer in fp16 ({setting.optimizer})"
    return list_faults((is_fault, law, f"optimizer={setting.optimizer_family}-foreach"))


SYNC = frozenset(("gradient_sync",))
_FSDP = SYNC | {"fsdp_reshard"}
PYTORCH = Trainer(
    "pytorch", "the PyTorch script", "train.py", partial(write_script, "train.py"),
    faults=task_faults,
    parallel={"ddp": Support(SYNC), "fsdp": Support(_FSDP), "hsdp": Support(_FSDP)},
)  # fmt: skip
ACCELERATE = Trainer(
    "accelerate", "accelerate", "train_accelerate.py", write_accelerate,
    ("ema",),
    # accelerator.py and state.py support FSDP only without `cpu`.
    parallel={"ddp": Support(SYNC), "fsdp": Support(_FSDP, needs_gpu=True)},
)  # fmt: skip
LIGHTNING = Trainer(
    "lightning", "Lightning's Trainer", "train_lightning.py",
    partial(write_script, "train_lightning.py"),
    (*IN_THE_LOOP, "ema", "fp16 on a CPU"), _lightning_faults,
)  # fmt: skip
TRANSFORMERS = Trainer(
    "transformers", "transformers' Trainer", "train_transformers.py",
    partial(write_script, "train_transformers.py"),
    (*IN_THE_LOOP, "ema", "fp16 on a CPU"), parallel={"ddp": Support(SYNC)},
)  # fmt: skip
DEEPSPEED_TRAINER = Trainer(
    "deepspeed", "DeepSpeed", "train_deepspeed.py", write_deepspeed,
    (*IN_THE_LOOP, "pure-bf16", "fp8", "fp16 on a CPU"),  # its bf16.enabled adds fp32 copies
    parallel={stage: Support() for stage in sorted(DEEPSPEED)},
)  # fmt: skip
TRAINERS: Mapping[str, Trainer] = {
    trainer.name: trainer
    for trainer in (
        TIMM, TRANSFORMERS, ACCELERATE, LIGHTNING, MICROSOFT,
        DEEPSPEED_TRAINER, PYTORCH,
    )
}  # fmt: skip
TARGETS = tuple(TRAINERS)


def find_trainer(name: str) -> Trainer:
    """The trainer that --for calls `name`. Raises UsageError."""
    if name not in TRAINERS:
        raise unknown_name("trainer", name, TRAINERS, f"Trainers: {', '.join(TRAINERS)}.")
    return TRAINERS[name]
