"""The trainers there are, and the files of those that run `train.py`: beside it lies one that runs
its step in another trainer's loop, and only the block of `train.py` is written here.

To add one: a `Trainer`, and a line in `TRAINERS`.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial

from planner.core.errors import unknown_name
from planner.core.schema import SwinConfig, TrainSetting
from planner.core.schema.setting import DEEPSPEED, OWN_OPTIMIZER, SHARDED
from planner.estimation.ledgers import fine_tunes, learning_rate_note
from planner.trainers.block import filled, own_factory, published_weights
from planner.trainers.launch import launch, nodes_notes, torchrun
from planner.trainers.microsoft import TRAINER as MICROSOFT
from planner.trainers.plan import WRITTEN_BY, Parallel, Plan, Refusal, Trainer, Written, refused
from planner.trainers.refusals import IN_THE_LOOP
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


def write(name: str, plan: Plan) -> Written:
    """`train.py` of `plan`, and the file `name` that runs it, where that is another."""
    script = plan.path(name)
    return _written(plan, name, lambda arguments: torchrun(script, plan, arguments))


def write_accelerate(plan: Plan) -> Written:
    setting, name = plan.setting, "train_accelerate.py"
    if plan.device == "cpu" and setting.world_size > 1:  # whose launcher starts one, unless by mpi
        return write(name, plan)
    how = "--cpu " if plan.device == "cpu" else "--multi_gpu " if setting.world_size > 1 else ""
    how += f"--num_processes {setting.world_size} --num_machines {setting.nodes}"
    if setting.nodes > 1:
        how += " --machine_rank RANK --main_process_ip HOST --main_process_port 29500"
    command = f"accelerate launch {how} --mixed_precision no --dynamo_backend no {plan.path(name)}"
    return _written(plan, name, lambda arguments: f"{command} {arguments}")


def write_deepspeed(plan: Plan) -> Written:
    setting, name = plan.setting, "train_deepspeed.py"
    hosts = f"--hostfile HOSTFILE --num_nodes {setting.nodes} " if setting.nodes > 1 else ""
    count = "--num_accelerators" if plan.device == "cpu" else "--num_gpus"
    command = (
        f"deepspeed --no_local_rank {hosts}{count} {setting.devices_per_node} {plan.path(name)}"
    )
    variables = {"DS_ACCELERATOR": "cpu"} if plan.device == "cpu" else {}
    written = _written(plan, name, lambda arguments: f"{command} {arguments}", variables)
    values = {"comment": f"{WRITTEN_BY}. Run: {written.run}", **configuration(setting)}
    written.modules[CONFIGURATION] = json.dumps(values, indent=2) + "\n"
    return written


def _written(
    plan: Plan, name: str, command: Callable[[str], str],
    variables: Mapping[str, str] | None = None,
) -> Written:  # fmt: skip
    """The files of `plan`: `name`, which `command` starts with arguments behind `variables`, and
    those beside it."""
    setting, rated = plan.setting, plan.recipe.learning_rate is not None
    is_own = setting.optimizer == OWN_OPTIMIZER
    words = ["--steps 20"] if plan.is_task else [] if own_factory(plan) else ["DATA"]
    if fine_tunes(setting) and published_weights(plan.model) is not None:
        words.append("--pretrained")
    if not rated and not is_own:
        words.append("--lr LR")
    run = launch(plan, command(" ".join(words)), variables)
    notes = _notes(plan)
    text = filled(plan, plan.comment(run, notes=notes))
    modules = {"train.py": text, "pictures.py": (FOLDER / "pictures.py").read_text("utf-8")}
    if plan.is_task:
        del modules["pictures.py"]
    if needs_levers(setting):
        modules["levers.py"] = (FOLDER / "levers.py").read_text("utf-8")
    if isinstance(plan.model, SwinConfig) and plan.model.library == "native":
        modules["native_swin.py"] = (_NATIVE / "native_swin.py").read_text("utf-8")
    if name != "train.py":
        modules[name] = (FOLDER / name).read_text("utf-8")
    return Written(modules.pop(name), run, notes, modules)


def needs_levers(setting: TrainSetting) -> bool:
    """Whether `train.py` takes something from `levers.py`."""
    return (
        setting.checkpointing != "none"
        or setting.offload != "none"
        or setting.precision == "fp8"
        or setting.memory_format != "contiguous"
        or setting.compile_scope != "model"
        or setting.parallelism in SHARDED
        or fine_tunes(setting)
    )


def _notes(plan: Plan) -> tuple[str, ...]:
    setting, model = plan.setting, plan.model
    if plan.is_task:
        return () if setting.optimizer == OWN_OPTIMIZER else (TASK_NOTE,)
    found = [learning_rate_note(setting, model), *nodes_notes(setting)]
    if fine_tunes(setting):
        found.append(RECIPE_NOTE)
        if published_weights(model) is None:
            found.append(
                f"{model.title} has no published weights under a name that its library loads: load "
                "yours in build_model(), before what is frozen, or it stays random."
            )
    if setting.parallelism in DEEPSPEED:
        found.append(
            "Buckets hold 25 MiB of fp32, as DDP's. DeepSpeed's own are of 500,000,000 elements: "
            "1 GB in 16 bits, 2 GB in fp32, whatever the model."
        )
    return tuple(found)


def task_refusals(plan: Plan) -> list[Refusal]:
    """One device only: how a task's module is called in parallel is the task's own matter."""
    law = f"the script of a task trains on one device, not on {plan.setting.world_size}"
    way_out = "Emit with --set world_size=1, and wrap the module in DistributedDataParallel."
    return [Refusal(law, way_out)] if plan.is_task and plan.setting.world_size > 1 else []


def _lightning_refusals(plan: Plan) -> list[Refusal]:
    """It clips no fused optimizer in fp16 (plugins/precision/amp.py)."""
    setting = plan.setting
    clips = bool(setting.clip_grad) and setting.optimizer_implementation == "fused"
    law = f"it does not clip the gradients of a fused optimizer in fp16 ({setting.optimizer})"
    change = f"optimizer={setting.optimizer_family}-foreach"
    return refused((clips and setting.precision == "fp16", law, change))


SYNC = frozenset(("gradient_sync",))
_FSDP = SYNC | {"fsdp_reshard"}
PYTORCH = Trainer(
    "pytorch", "the PyTorch script", "train.py", partial(write, "train.py"),
    refusals=task_refusals,
    parallel={"ddp": Parallel(SYNC), "fsdp": Parallel(_FSDP), "hsdp": Parallel(_FSDP)},
)  # fmt: skip
ACCELERATE = Trainer(
    "accelerate", "accelerate", "train_accelerate.py", write_accelerate,
    ("ema",),
    # accelerator.py and state.py look for FSDP where there is no `cpu` only.
    parallel={"ddp": Parallel(SYNC), "fsdp": Parallel(_FSDP, needs_gpu=True)},
)  # fmt: skip
LIGHTNING = Trainer(
    "lightning", "Lightning's Trainer", "train_lightning.py", partial(write, "train_lightning.py"),
    (*IN_THE_LOOP, "ema", "fp16 on a CPU"), _lightning_refusals,
)  # fmt: skip
TRANSFORMERS = Trainer(
    "transformers", "transformers' Trainer", "train_transformers.py",
    partial(write, "train_transformers.py"),
    (*IN_THE_LOOP, "ema", "fp16 on a CPU"), parallel={"ddp": Parallel(SYNC)},
)  # fmt: skip
DEEPSPEED_TRAINER = Trainer(
    "deepspeed", "DeepSpeed", "train_deepspeed.py", write_deepspeed,
    (*IN_THE_LOOP, "pure-bf16", "fp8", "fp16 on a CPU"),  # its bf16.enabled adds fp32 copies
    parallel={stage: Parallel() for stage in sorted(DEEPSPEED)},
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
