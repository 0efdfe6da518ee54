"""What the installed torch says of itself and of the GPUs it sees: asked in a process that ends.

No torch is imported here, and no CUDA context is made: what must happen for an answer, happens
there. A driver that answers is not enough: torch may be built for a newer one, or without code for
the card at hand.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# The order of GPUs that nvidia-smi and the driver's library have; CUDA's own is by speed.
DEVICE_ORDER = "CUDA_DEVICE_ORDER"
BUS_ORDER = "PCI_BUS_ID"

_DEADLINE_SECONDS = 120  # a first import from a cold network disk can take a minute
# A kernel that runs is the only proof; a card that is full has still proven that it can.
_ASK = """
import json, sys, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip,
         "available": torch.cuda.is_available(), "reason": "", "arch_list": [], "gpus": []}

def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]

def try_out(index):
    try:
        torch.ones(8, device=f"cuda:{index}").sum().item()
    except torch.OutOfMemoryError:
        return ""
    except Exception as error:
        return "" if "CUDA error: out of memory" in str(error) else first_line(error)
    return ""

if found["available"]:
    found["arch_list"] = torch.cuda.get_arch_list()
    tried = json.loads(sys.argv[1])
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        error = try_out(index) if tried is None or index in tried else ""
        found["gpus"].append({"name": p.name, "total_bytes": p.total_memory,
                              "capability": [p.major, p.minor],
                              "uuid": str(getattr(p, "uuid", "")), "error": error})
elif found["cuda"] or found["hip"]:
    try:
        torch.cuda.init()
    except Exception as error:
        found["reason"] = first_line(error)
print(json.dumps(found))
"""
_ARCH = re.compile(r"(sm|compute)_(\d+)(\d)([a-z]?)")


@dataclass(frozen=True)
class TorchGpu:
    """A GPU as torch has it; `error` says why a small kernel failed on it, where one was tried."""

    name: str
    total_bytes: int
    capability: tuple[int, int]
    uuid: str = ""
    error: str = ""


@dataclass(frozen=True)
class TorchBuild:
    """What the installed torch says of itself; `error` where it could not be imported, `reason`
    where it is built for GPUs and can use none. `arch_list` is what its kernels are compiled for:
    `sm_90` (machine code), `compute_90` (what the driver compiles for later cards)."""

    version: str = ""
    cuda: str | None = None
    hip: str | None = None
    available: bool = False
    num_devices: int = 0
    error: str = ""
    reason: str = ""
    arch_list: tuple[str, ...] = ()
    gpus: tuple[TorchGpu, ...] = ()


def ask_torch(
    environ: Mapping[str, str] = os.environ, tried: Sequence[int] | None = None
) -> TorchBuild:
    """How torch was built, which GPUs it sees, and whether it can run on those with an index in
    `tried` (on all of them, where it is None)."""
    arguments = json.dumps(tried if tried is None else list(tried))
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _ASK, arguments], env=bus_ordered(environ),
            capture_output=True, text=True, timeout=_DEADLINE_SECONDS, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return TorchBuild(error=f"importing torch took over {_DEADLINE_SECONDS} s")
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return TorchBuild(error=lines[-1] if lines else f"it ended with status {done.returncode}")
    return _read_answer(json.loads(done.stdout.strip().splitlines()[-1]))


def _read_answer(found: dict[str, object]) -> TorchBuild:
    gpus = found.pop("gpus")
    assert isinstance(gpus, list)
    told = tuple(TorchGpu(**{**g, "capability": tuple(g["capability"])}) for g in gpus)
    arch_list = found.pop("arch_list")
    assert isinstance(arch_list, list)
    return TorchBuild(
        **found,  # type: ignore[arg-type]
        num_devices=len(told),
        arch_list=tuple(arch_list),
        gpus=told,
    )


def bus_ordered(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a process that numbers GPUs as the driver does, unless it says otherwise."""
    return {DEVICE_ORDER: BUS_ORDER, **environ}


def why_not_usable(build: TorchBuild, index: int = 0) -> str | None:
    """Why torch cannot compute on `cuda:index`, in a clause; None where it can."""
    if build.error:
        return f"torch cannot be imported ({build.error})"
    if build.cuda is None and build.hip is None:
        return "this torch is built for the CPU only"
    if not build.available:
        return f"torch {build.version} cannot use a GPU here ({build.reason or 'it finds none'})"
    if index >= len(build.gpus):
        return f"torch sees {len(build.gpus)} GPUs, and none has index {index}"
    gpu = build.gpus[index]
    if build.cuda is not None and not has_code_for(gpu.capability, build.arch_list):
        major, minor = gpu.capability
        return (
            f"torch {build.version} has no code for {gpu.name} of compute capability "
            f"{major}.{minor} (it has {', '.join(build.arch_list)})"
        )
    return f"torch cannot run on {gpu.name} ({gpu.error})" if gpu.error else None


def has_code_for(capability: tuple[int, int], arch_list: Sequence[str]) -> bool:
    """Whether kernels compiled for `arch_list` run on a card of this capability.

    Machine code (`sm_86`) runs on later minor versions of its major one, PTX (`compute_86`) on
    everything later; what ends in `a` runs on that very capability, in `f` on its family. An empty
    list says nothing, and refuses nothing.
    """
    known = [_runs(found.groups(), capability) for a in arch_list if (found := _ARCH.fullmatch(a))]
    return any(known) or not known


def _runs(arch: tuple[str | None, ...], capability: tuple[int, int]) -> bool:
    kind, major, minor, suffix = arch
    compiled = (int(major or 0), int(minor or 0))
    if suffix == "a":
        return compiled == capability
    if kind == "compute" and not suffix:
        return compiled <= capability
    return compiled[0] == capability[0] and compiled[1] <= capability[1]
