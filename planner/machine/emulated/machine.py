"""Emulated GPUs, of the catalogue or of one's own, the machine that they are in, and the
environment in which programs find it.

On such a GPU torch's own CUDA code runs; only the kernels compute nothing, except a few whose
results steer a training. So memory is what torch would allocate. Times are not what a card would
take: each piece of work costs what the catalogue's rates say, and nothing was measured.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory

from planner.core.errors import PlannerError, UnsupportedError, UsageError, shorten
from planner.core.torch_version import installed_version
from planner.core.units import MIB
from planner.machine.emulated.build import NVML_FOLDER, PARTS, architectures, built_libraries
from planner.machine.hardware import Gpu, find_gpu
from planner.machine.hardware.overheads import CONTEXT_BYTES
from planner.machine.torch_build import INDEX, fitting_build, has_code_for, version_text

MAX_GPUS = 16  # of source/machine.h
PAGE_BYTES = 2 * MIB  # in which the driver hands out memory: cuMemGetAllocationGranularity


@dataclass(frozen=True)
class EmulatedGpu:
    """One device, as its driver describes it.

    - `memory_bytes`: what CUDA calls its total. The driver keeps `kept_bytes` of it, and each
      process takes `context_bytes`.
    - `is_slice`: a MIG instance, of which NVML tells less. `lacks_virtual_memory`: it has no
      expandable segments, as some virtual GPUs.
    - `illegal_access_after`: after so many launches a kernel of the process accesses memory that is
      not its own. `lost_after`: the device falls off the bus, for all processes. 0: never.
    - `launch_seconds`, the rates in FLOP/s and `bandwidth` in bytes/s drive the emulated clock;
      with 0 work costs nothing.
    - The clocks, the bus, the power limit and `l2_bytes` are for programs that print them.
    - `notice`: the first program that uses the GPU prints it on standard error.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    num_sms: int
    threads_per_sm: int
    context_bytes: int = CONTEXT_BYTES
    kept_bytes: int = 0
    is_slice: bool = False
    lacks_virtual_memory: bool = False
    illegal_access_after: int = 0
    lost_after: int = 0
    half_flops: float = 0.0
    tf32_flops: float = 0.0
    fp32_flops: float = 0.0
    bandwidth: float = 0.0
    launch_seconds: float = 5e-6  # assumed
    clock_mhz: int = 1500
    memory_clock_mhz: int = 8000
    bus_bits: int = 256
    watts: int = 300
    l2_bytes: int = 6 * MIB  # a GeForce RTX 3090's (NVIDIA Ampere GA102 whitepaper, table 2)
    notice: str = ""

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable():
            law = f"a GPU's name is a line of text, and {shorten(self.name)} is not."
            raise UsageError(law, "Write it without control characters.")
        negative = [f.name for f in fields(self) if _is_negative(getattr(self, f.name))]
        if negative:
            law = f"a GPU's figures are 0 or more; below 0: {', '.join(negative)}."
            raise UsageError(law, "Omit them, or give 0.")


@dataclass(frozen=True)
class EmulatedMachine:
    """The GPUs of a machine, and what its driver tells of them.

    `driver_version` is the newest CUDA that the driver knows: 13020 is 13.2. NVML may be absent,
    may know no processes (as in a container) and may be off by `nvml_used_error` bytes. Where the
    machine `waits`, a program that synchronises sleeps as long as the emulated clock says. The file
    `log` receives the names of functions that are not emulated.
    """

    gpus: tuple[EmulatedGpu, ...]
    driver_version: int = 13020
    has_nvml: bool = True
    hides_processes: bool = False
    nvml_used_error: int = 0
    waits: bool = False
    log: str = ""

    def __post_init__(self) -> None:
        if not 1 <= len(self.gpus) <= MAX_GPUS:
            law = f"a machine has 1 to {MAX_GPUS} GPUs, and not {len(self.gpus)}."
            raise UsageError(law, f"Choose from 1 to {MAX_GPUS}.")


def emulated_gpu(gpu: str | Gpu, **changes: object) -> EmulatedGpu:
    """A GPU of the catalogue, with `changes` to any field of EmulatedGpu. Where the installed torch
    has no kernels for it, those for another capability stand in, and its name says so. Raises
    UsageError for an unknown GPU, UnsupportedError for one that CUDA does not drive."""
    card = find_gpu(gpu) if isinstance(gpu, str) else gpu
    if card.capability is None:
        raise UnsupportedError(
            f"{card.title} cannot be emulated: only NVIDIA's GPUs can.",
            "List GPUs with 'planner gpus'.",
        )
    values: dict[str, object] = {
        "name": card.device_names[0] if card.device_names else card.title,
        "memory_bytes": card.memory_bytes // PAGE_BYTES * PAGE_BYTES,
        "capability": card.capability,
        "num_sms": card.num_sms,
        "threads_per_sm": card.threads_per_sm,
        "half_flops": card.bf16_flops or card.fp16_flops or card.fp32_flops,
        "tf32_flops": card.tf32_flops or card.fp32_flops,
        "fp32_flops": card.fp32_flops,
        "bandwidth": card.bandwidth,
    }
    if card.boost_mhz:
        values["clock_mhz"] = card.boost_mhz
    if not has_code_for(card.capability, architectures()):
        values |= _stand_in(str(values["name"]), card.capability)
    known = {f.name for f in fields(EmulatedGpu)}
    unknown = sorted(set(changes) - known)
    if unknown:
        law = f"an emulated GPU has no {', '.join(map(shorten, unknown))}."
        raise UsageError(law, f"Its fields: {', '.join(sorted(known))}.")
    return EmulatedGpu(**{**values, **changes})  # type: ignore[arg-type]


def _stand_in(name: str, capability: tuple[int, int]) -> dict[str, object]:
    """The changes for a GPU whose capability the installed torch has no kernels for: the next
    capability that it has, or its last, a name and a notice."""
    numbers = re.findall(r"sm_(\d+)(\d)", " ".join(architectures()))
    compiled = sorted((int(major), int(minor)) for major, minor in numbers)
    other = next((c for c in compiled if c > capability), compiled[-1])
    build = fitting_build("", capability, installed_version("torch"))
    needs = "an older torch"
    if build is not None:
        package = f'"torch=={version_text(build.release)}.*" --index-url {INDEX}/{build.tag}'
        needs = f"pip install --force-reinstall {package}"
    notice = (
        f"the installed torch has no kernels for compute capability {version_text(capability)} of "
        f"{name}: those for {version_text(other)} stand in. A real one needs {needs}"
    )
    return {"capability": other, "name": f"{name} as {version_text(other)}", "notice": notice}


def configuration_text(machine: EmulatedMachine, table: str) -> str:
    """The configuration that source/configuration.c reads: a line `key value` for each. `table` is
    the file in shared memory that holds which process has how much."""
    lines = [f"table {table}"]
    for name in ("log", "driver_version", "hides_processes", "waits", "nvml_used_error"):
        lines += _entry(name, getattr(machine, name))
    for gpu in machine.gpus:
        lines.append(f"gpu {gpu.name}")
        for f in fields(gpu)[1:]:
            lines += _entry(f.name, getattr(gpu, f.name))
    return "\n".join([*lines, ""])


def _entry(name: str, value: object) -> list[str]:
    if isinstance(value, tuple):  # a capability: 8.6 is 86
        value = 10 * value[0] + value[1]
    return [f"{name} {int(value) if isinstance(value, bool) else value}"] if value else []


def _is_negative(value: object) -> bool:
    return isinstance(value, int | float) and value < 0


# Processes on an emulated machine: the environment that brings them there, and those that hold
# memory of its GPUs.

EMULATED_GPU = "PLANNER_EMULATED_GPU"
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
    """Whether programs with this environment find emulated GPUs."""
    return EMULATED_GPU in environment


@contextmanager
def started(
    machine: EmulatedMachine, environment: Mapping[str, str] = os.environ
) -> Iterator[dict[str, str]]:
    """The environment in which programs find `machine`, on top of the given one. Its memory is
    empty at first, and shared by all that run in it. Raises PlannerError where the libraries cannot
    be built.

    The installed packages are not touched: our libraries are loaded before theirs, under the same
    names.
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
    paths = environment.get("LD_LIBRARY_PATH", "").split(":")
    return {
        EMULATED_GPU: str(configuration),
        "LD_PRELOAD": ":".join(filter(None, [*preloaded, *before])),
        "LD_LIBRARY_PATH": ":".join(filter(None, [*searched, *paths])),
    }


@contextmanager
def holding(
    environment: Mapping[str, str], num_bytes: int, device: int = 0
) -> Iterator[subprocess.Popen[str]]:
    """Within, another process holds `num_bytes` on a device of a started machine, beside its
    context. Raises PlannerError where they are not free."""
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
