"""The command that trains with an emitted file, and the environment in front of it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from planner.core.schema import TrainSetting
from planner.memory.allocator_config import VARIABLES as ALLOCATOR_VARIABLES
from planner.trainers.plan import Plan

PORT = 29500  # torchrun's and accelerate's own


def launch(plan: Plan, command: str, variables: Mapping[str, str] | None = None) -> str:
    """`command` behind its environment: the allocator's as it was probed, and `variables`. On the
    CPU it says nothing of the allocator."""
    given = dict(variables or {})
    if plan.allocator and plan.device == "cuda":
        given = {ALLOCATOR_VARIABLES[0]: plan.allocator, **given}
    words = [f"{name}={shlex.quote(value)}" for name, value in given.items()]
    return " ".join((*words, command))


def torchrun(script: str, plan: Plan, arguments: str = "") -> str:
    """The command that runs `script` (quoted already) on every device, of each machine.

    A standalone rendezvous takes a free port; of several machines one is HOST. A training that lost
    a rank does not start again by itself.
    """
    setting = plan.setting
    if setting.parallelism == "none":
        return f"python {script} {arguments}".rstrip()
    meeting = (
        f"--nnodes {setting.nodes} --rdzv-backend c10d --rdzv-endpoint HOST:{PORT}"
        if setting.nodes > 1
        else "--standalone"
    )
    each = f"--nproc-per-node {setting.devices_per_node} --max-restarts=0"
    return f"torchrun {meeting} {each} {script} {arguments}".rstrip()


def nodes_notes(setting: TrainSetting) -> tuple[str, ...]:
    """What several machines ask of whoever starts them."""
    if setting.nodes == 1:
        return ()
    return (
        f"Run the line on each of the {setting.nodes} machines; HOST is one of them, by a name "
        "that all of them reach. Software and data are the same on all.",
    )


def tf32_notes(plan: Plan, why: str) -> tuple[str, ...]:
    """What the variables of `tf32_environment` do, and `why` it is they that do it."""
    if plan.device == "cpu":
        return ()
    return {
        "fp32": ("NVIDIA_TF32_OVERRIDE=0 keeps convolutions in plain fp32 too.",),
        "tf32": (f"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 turns TF32 on: {why}.",),
    }.get(plan.setting.precision, ())


OLDER_PILLOW = (
    "With pillow<13: timm's RandAugment posterizes to no bits at times, and Pillow 13 refuses that."
)
"""Measured 2026-11-24 with timm 1.0.31: 9 of 5,000 pictures raise ValueError in Pillow 13.0.0. With
12.3.0 and before no bits make a black picture."""
RESUMES = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
"""For trainers whose checkpoints hold more than weights, and which load them as torch before 2.6
did: from then on torch.load refuses all else unless told."""
RESUMES_NOTE = (
    "Without TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 torch 2.6 and later refuse to load its checkpoints "
    "when training goes on from one: give it such files only as you trust."
)


def tf32_environment(plan: Plan) -> dict[str, str]:
    """The variables that set TF32 where a trainer has no key for it.

    Quoted: pytorch aten/src/ATen/Context.h reads TORCH_ALLOW_TF32_CUBLAS_OVERRIDE for matrices
    (convolutions are in TF32 unless told); NVIDIA's libraries read NVIDIA_TF32_OVERRIDE.
    """
    if plan.device == "cpu":
        return {}
    if plan.setting.precision == "tf32":
        return {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    return {"NVIDIA_TF32_OVERRIDE": "0"} if plan.setting.precision == "fp32" else {}
