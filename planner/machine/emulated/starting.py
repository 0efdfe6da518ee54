"""Processes on an emulated machine: the environment that brings them there, and those that hold
memory of its GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from planner.core.errors import PlannerError
from planner.machine.emulated.building import NVML_FOLDER, PARTS, built_libraries
from planner.machine.emulated.machine import EmulatedMachine, configuration_text

CONFIGURATION = "PLANNER_EMULATED_GPU"
SHARED_MEMORY = Path("/dev/shm")

# A CUDA program: a context on a device, and memory there until its input ends.
HOLDER = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
device, size = map(int, sys.argv[1:])
context, memory = ctypes.c_void_p(), ctypes.c_void_p()
failed = (
    cuda.cuInit(0)
    or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    or cuda.cuCtxSetCurrent(context)
    or (cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(size)) if size else 0)
)
print(failed, flush=True)
sys.stdin.read()
"""


def is_emulated(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether programs with this environment find emulated GPUs, whose times are nobody's."""
    return CONFIGURATION in environment


@contextmanager
def started(
    machine: EmulatedMachine, environment: Mapping[str, str] = os.environ
) -> Iterator[dict[str, str]]:
    """The environment in which programs find `machine`, on top of the given one; its memory is
    empty at first, and shared by all that run in it. Raises PlannerError where nothing can be
    built.

    Nothing of the installed packages is touched: the libraries are loaded before theirs, under the
    same names.
    """
    libraries = built_libraries()
    if not os.access(SHARED_MEMORY, os.W_OK):
        raise PlannerError(f"{SHARED_MEMORY} cannot be written.", "In a container: --shm-size 1g")
    with TemporaryDirectory(prefix=f"planner-emulated-{os.getpid()}-", dir=SHARED_MEMORY) as folder:
        configuration, table = Path(folder) / "machine.txt", Path(folder) / "table"
        table.touch()
        configuration.write_text(configuration_text(machine, str(table)))
        yield {**environment, **_variables(libraries, configuration, machine, environment)}


def _variables(
    libraries: Path, configuration: Path, machine: EmulatedMachine, environment: Mapping[str, str]
) -> dict[str, str]:
    preloaded = [str(p) for name in PARTS for p in libraries.glob(f"{name}.*")]
    searched = [str(libraries)]
    if machine.has_nvml:
        searched.append(str(libraries / NVML_FOLDER))
    before = environment.get("LD_PRELOAD", "").split(":")
    found = environment.get("LD_LIBRARY_PATH", "").split(":")
    return {
        CONFIGURATION: str(configuration),
        "LD_PRELOAD": ":".join(filter(None, [*preloaded, *before])),
        "LD_LIBRARY_PATH": ":".join(filter(None, [*searched, *found])),
    }


@contextmanager
def holding(
    environment: Mapping[str, str], num_bytes: int, device: int = 0
) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds `num_bytes` on a device of a started machine, beside its context,
    until it is left. Raises PlannerError where they are not free."""
    command = [sys.executable, "-S", "-c", HOLDER, str(device), str(num_bytes)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        answer = process.stdout.readline().strip()
        if answer != "0":
            process.kill()
            raise PlannerError(
                f"{num_bytes} bytes on device {device} cannot be held: the emulated driver "
                f"answered {answer or 'nothing'}.",
                "Hold fewer, or give the GPU more memory.",
            )
        yield process
        process.kill()
