"""The command that trains with an emitted file, and the environment in front of it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from planner.schema import TrainSetting
from planner.trainers.plan import Plan

PORT = 29500  # torchrun's and accelerate's own


def launch(plan: Plan, command: str, variables: Mapping[str, str] | None = None) -> str:
    """`command` behind its environment: the allocator's as it was probed, and `variables`.

    torch reads PYTORCH_ALLOC_CONF from 2.9 on, before that PYTORCH_CUDA_ALLOC_CONF
    (c10/core/AllocatorConfig.h). On the CPU it says nothing.
    """
    given = dict(variables or {})
    if plan.allocator and plan.device == "cuda":
        given = {"PYTORCH_ALLOC_CONF": plan.allocator, **given}
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


def tf32_notes(setting: TrainSetting, why: str) -> tuple[str, ...]:
    """What the variables of `tf32_environment` do, and `why` it is they that do it."""
    return {
        "fp32": ("NVIDIA_TF32_OVERRIDE=0 keeps convolutions in plain fp32 too.",),
        "tf32": (f"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 turns TF32 on: {why}.",),
    }.get(setting.precision, ())


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
