"""The command that trains with an emitted file, with its environment; and the loader of its data:
the measured one or Swin's usual one, and the notes on both.
"""

import shlex
from collections.abc import Mapping

from planner.core.schema import TrainSetting
from planner.core.schema.record import DataResult, LoaderSetting
from planner.memory.allocator_config import VARIABLES as ALLOCATOR_VARIABLES
from planner.trainers.plan import Plan, Trainer, one_line
from planner.trainers.recipe import usual_loader

PORT = 29500  # torchrun's and accelerate's own


def launch_line(plan: Plan, command: str, variables: Mapping[str, str] | None = None) -> str:
    """`command` after its environment: that of the probed allocator (on a GPU) and `variables`."""
    environment = dict(variables or {})
    if plan.allocator and plan.device == "cuda":
        environment = {ALLOCATOR_VARIABLES[0]: plan.allocator, **environment}
    assignments = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    return " ".join((*assignments, command))


def torchrun_line(script: str, plan: Plan, arguments: str = "") -> str:
    """The command that runs `script` (already quoted) on every device of a machine.

    On one machine the rendezvous takes a free port; of several machines one is HOST. A training
    that lost a rank does not restart by itself.
    """
    setting = plan.setting
    if setting.parallelism == "none":
        return f"python {script} {arguments}".rstrip()
    rendezvous = (
        f"--nnodes {setting.nodes} --rdzv-backend c10d --rdzv-endpoint HOST:{PORT}"
        if setting.nodes > 1
        else "--standalone"
    )
    processes = f"--nproc-per-node {setting.devices_per_node} --max-restarts=0"
    return f"torchrun {rendezvous} {processes} {script} {arguments}".rstrip()


def node_notes(setting: TrainSetting) -> tuple[str, ...]:
    """How to start a training on several machines."""
    if setting.nodes == 1:
        return ()
    return (
        f"Run the line on each of the {setting.nodes} machines; HOST is one of them, by a name "
        "that all of them reach. Software and data are the same on all.",
    )


def tf32_notes(plan: Plan, reason: str) -> tuple[str, ...]:
    """What the variables of `tf32_environment` do, with the `reason` for the one that turns TF32
    on."""
    if plan.device == "cpu":
        return ()
    return {
        "fp32": ("NVIDIA_TF32_OVERRIDE=0 keeps convolutions in plain fp32 too.",),
        "tf32": (f"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 turns TF32 on: {reason}.",),
    }.get(plan.setting.precision, ())


# Measured 2026-11-24 with timm 1.0.31: 9 of 5,000 pictures raise ValueError in Pillow 13.0.0. With
# 12.3.0 and before no bits make a black picture.
OLD_PILLOW = (
    "With pillow<13: timm's RandAugment posterizes to no bits at times, and Pillow 13 refuses that."
)
# For trainers whose checkpoints hold more than weights, and which load them as torch before 2.6
# did: since then torch.load refuses anything but weights by default.
RESUME_ENVIRONMENT = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
RESUME_NOTE = (
    "Without TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 torch 2.6 and later refuse to load its checkpoints "
    "when training goes on from one: give it such files only as you trust."
)


def tf32_environment(plan: Plan) -> dict[str, str]:
    """The environment variables that set TF32 where a trainer has no key for it.

    Quoted: pytorch aten/src/ATen/Context.h reads TORCH_ALLOW_TF32_CUBLAS_OVERRIDE for matrices
    (convolutions use TF32 by default); NVIDIA's libraries read NVIDIA_TF32_OVERRIDE.
    """
    if plan.device == "cpu":
        return {}
    if plan.setting.precision == "tf32":
        return {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    return {"NVIDIA_TF32_OVERRIDE": "0"} if plan.setting.precision == "fp32" else {}


def train_loader(plan: Plan) -> LoaderSetting:
    """The loader of one process.

    A measured loader had the whole machine for one process, so several processes share its workers.
    Each process has the usual eight workers to itself, as in Swin's published training.
    """
    setting = plan.setting
    if plan.loader is None:
        usual = usual_loader(setting)
        return usual.model_copy(update={"pin_memory": plan.device == "cuda"})
    workers = max(1, plan.loader.workers // setting.world_size) if plan.loader.workers else 0
    return plan.loader.model_copy(update={"batch_size": setting.batch_size, "workers": workers})


def loader_heading(plan: Plan) -> tuple[str, ...]:
    """Where the loader's figures come from, as lines of a comment. The loader of a task is the
    user's: without a measurement there is nothing to say about it."""
    world, workers = plan.setting.world_size, train_loader(plan).workers
    if plan.measured_data is None or plan.loader is None:
        count = f"{workers} workers" if world == 1 else f"{workers} in each process"
        line = (
            f"Loader: not measured. It has {count}, as Swin's authors use; give it no more than "
            "there are processors."
        )
        return () if plan.is_task else (line,)
    lines = [_measured_heading(plan.measured_data)]
    if world > 1 and plan.loader.workers:
        lines.append(
            f"Workers are those of one process: the {plan.loader.workers} measured are shared by "
            f"{world} processes, {workers} each."
        )
    return tuple(lines)


def _measured_heading(data: DataResult) -> str:
    count = f"{data.processors:g} processor{'s' if data.processors > 1 else ''}"
    day = f", {one_line(data.date[:10])}" if data.date else ""
    return (
        f"Loader: {data.setting.title}, measured at {data.images_per_second:.1f} images/s on "
        f"{count}, bound by its {data.bound}{day}."
    )


def loader_warnings(trainer: Trainer, plan: Plan) -> tuple[str, ...]:
    """A warning where `trainer` does not use the measured loader, with the way out."""
    if plan.loader is None or plan.is_task or trainer.own_loader is None:
        return ()
    return (
        f"{trainer.title} loads pictures by itself ({trainer.own_loader}), and not as was measured "
        f"({plan.loader.title}): its rate was not. The plain script does: --for pytorch.",
    )
