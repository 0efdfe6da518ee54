"""What to time between which devices of a machine. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass

from planner.core.collectives import Collective
from planner.core.errors import PlannerError, UsageError
from planner.core.units import KIB
from planner.machine.facts import Facts
from planner.machine.hardware.link_file import COLLECTIVES
from planner.machine.hardware.processor import cpu_name
from planner.machine.links.proposal import propose_link
from planner.machine.torch_build import why_not_usable

# From what is all latency to what is all bandwidth; a bucket of DDP is 25 MiB.
CUDA_SIZES = tuple(KIB * 4**n for n in range(10))  # 1 KiB … 256 MiB
CPU_SIZES = tuple(KIB * 4**n for n in range(9))  # 1 KiB … 64 MiB: each rank holds it in memory
BUDGET_SECONDS = 30.0
# Beside the budget: importing torch on a busy machine and a first NCCL communicator.
START_SECONDS = 120.0
MAX_PROCESSES = 64  # ranks over gloo: more would time the scheduler


@dataclass(frozen=True)
class LinkPlan:
    """Collectives to time on GPUs ("nccl") or between processes ("gloo"). `sizes` are bytes of the
    whole array; after `budget_seconds` no larger one is begun."""

    backend: str
    world_size: int
    device: str
    sizes: tuple[int, ...]
    collectives: tuple[Collective, ...] = COLLECTIVES
    budget_seconds: float = BUDGET_SECONDS
    deadline_seconds: float = START_SECONDS + 2 * BUDGET_SECONDS
    topology: str = ""


def plan_link(device: str, world_size: int | None, facts: Facts) -> LinkPlan:
    """The plan for `device` ("auto", "cpu", "cuda:0") and so many of them: by default all GPUs, or
    two processes of the CPU. Raises PlannerError."""
    why = "" if device == "cpu" else why_not_usable(facts.torch) or ""
    if device not in ("auto", "cpu", "cuda:0"):
        raise UsageError(
            f"--links takes the first GPUs in the driver's order, not {device!r}.",
            "Choose them by CUDA_VISIBLE_DEVICES, and pass --gpus N.",
        )
    if device != "auto" and why:
        raise PlannerError(f"{device!r} cannot be used: {why}.", "Pass auto or cpu.")
    if device == "cpu" or why:
        return _between_processes(world_size or 2)
    return _between_gpus(world_size, facts)


def _between_processes(world_size: int) -> LinkPlan:
    if world_size > MAX_PROCESSES:
        raise UsageError(
            f"--links times at most {MAX_PROCESSES} processes over gloo, not {world_size}.",
            "Pass a smaller --gpus.",
        )
    return LinkPlan("gloo", world_size, cpu_name(), CPU_SIZES)


def _between_gpus(world_size: int | None, facts: Facts) -> LinkPlan:
    names = [gpu.name for gpu in facts.torch.gpus]
    if len(names) < 2:
        raise UsageError(
            f"a link is between two devices or more, and torch sees one GPU ({names[0]}).",
            "Pass --device cpu to time processes over gloo, or name a link: planner estimate "
            "--link.",
        )
    count = world_size or len(names)
    if count > len(names):
        raise UsageError(
            f"--gpus {count} are more than the {len(names)} GPUs that torch sees.",
            f"Pass --gpus {len(names)}; CUDA_VISIBLE_DEVICES may hide some.",
        )
    device = ", ".join(dict.fromkeys(names[:count]))
    joined = propose_link(facts)
    return LinkPlan("nccl", count, device, CUDA_SIZES, topology=joined.why if joined else "")
