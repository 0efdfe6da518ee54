"""The build of the installed torch: what another process says of it and of the GPUs it sees, and
whether it can use them; and which published builds a driver and a card allow.

Nothing here imports torch or makes a CUDA context. A driver that answers is not enough: torch may
be built for a newer one, or without code for the card at hand.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from planner.core.torch_version import installed_version
from planner.machine.torch_answers import NO_ANSWER

# The order of GPUs that nvidia-smi and the driver's library have; CUDA's own is by speed.
DEVICE_ORDER = "CUDA_DEVICE_ORDER"
BUS_ORDER = "PCI_BUS_ID"

_DEADLINE_SECONDS = 120  # a first import from a cold network disk can take a minute
_ANSWERS = Path(__file__).with_name("torch_answers.py")
_ARCH = re.compile(r"(sm|compute)_(\d+)(\d)([a-z]?)")


@dataclass(frozen=True)
class TorchGpu:
    """A GPU as torch describes it. `error` says why a small kernel failed on it, `segment_error`
    why an expandable segment did; "" where it ran, or was not tried."""

    name: str
    total_bytes: int
    capability: tuple[int, int]
    uuid: str = ""
    error: str = ""
    segment_error: str = ""


@dataclass(frozen=True)
class TorchBuild:
    """What the installed torch says of itself.

    - `error`: why it could not be imported. `reason`: why it can use no GPU, where it is built for
      GPUs. `failed`: questions that failed or ended the process, with the last line of each.
    - `arch_list`: what its kernels are compiled for: `sm_90` (machine code), `compute_90` (what the
      driver compiles for later cards).
    - `cudnn`: the number that cuDNN gives itself (91002). `cudnn_error`: why it gives none.
    """

    version: str = ""
    cuda: str | None = None
    hip: str | None = None
    available: bool = False
    error: str = ""
    reason: str = ""
    arch_list: tuple[str, ...] = ()
    gpus: tuple[TorchGpu, ...] = ()
    cudnn: str = ""
    cudnn_error: str = ""
    nccl: str = ""
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_missing(self) -> bool:
        """Whether no torch is installed: not so of one that is there and cannot be imported."""
        return "No module named 'torch'" in self.error

    @property
    def libraries(self) -> dict[str, str]:
        """The versions of the CUDA libraries that this torch uses, as far as it tells them."""
        # MIOpen answers in cuDNN's place where torch is built for ROCm, in numbers of its own.
        cudnn = cudnn_release(self.cudnn) if self.cuda else ""
        releases = {"cudnn": cudnn, "nccl": self.nccl}
        return {name: release for name, release in releases.items() if release}


def ask_torch(
    environ: Mapping[str, str] = os.environ, tried: Sequence[int] | None = None
) -> TorchBuild:
    """How torch was built, which GPUs it sees, and whether it can run on the GPUs with an index in
    `tried` (None: on all)."""
    from pydantic import TypeAdapter

    indices = json.dumps(tried if tried is None else list(tried))
    ended, errors = f"it took over {_DEADLINE_SECONDS} s", ""
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(_ANSWERS), indices], env=bus_ordered(environ),
            capture_output=True, text=True, timeout=_DEADLINE_SECONDS, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        output, errors = done.stdout, done.stderr.strip()
        ended = errors.splitlines()[-1] if errors else f"it ended with status {done.returncode}"
    except subprocess.TimeoutExpired as late:
        output = (late.stdout or b"").decode(errors="replace")
    answers = [line for line in output.splitlines() if line.startswith("{")]
    if not answers:
        return TorchBuild(error=ended)
    build: TorchBuild = TypeAdapter(TorchBuild).validate_python(json.loads(answers[-1]))
    failed = {q: ended if why == NO_ANSWER else why for q, why in build.failed.items()}
    gpus = tuple(
        replace(gpu, error=gpu.error or failed.get(f"a kernel on cuda:{index}", ""))
        for index, gpu in enumerate(build.gpus)
    )
    return replace(build, failed=failed, gpus=gpus)


def cudnn_release(number: str) -> str:
    """cuDNN's number as people write it: 91002 is 9.10.2; before version 9, 8907 is 8.9.7."""
    if not re.fullmatch("[0-9]{1,9}", number):
        return number
    unit = 10_000 if int(number) >= 90_000 else 1000
    major, rest = divmod(int(number), unit)
    return f"{major}.{rest // 100}.{rest % 100}"


def bus_ordered(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a process that is to number GPUs as the driver does, unless it says
    otherwise."""
    return {DEVICE_ORDER: BUS_ORDER, **environ}


def why_not_usable(build: TorchBuild, index: int = 0) -> str | None:
    """Why torch cannot compute on `cuda:index`, in a clause; None where it can."""
    if build.error:
        return f"torch cannot be imported ({build.error})"
    if build.cuda is None and build.hip is None:
        return "this torch is built for the CPU only"
    if not build.available:
        why = build.reason or build.failed.get("torch.cuda.is_available()") or "it finds none"
        return f"torch {build.version} cannot use a GPU here ({why})"
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

    Machine code (`sm_86`) runs on its capability and on later minor versions, PTX (`compute_86`) on
    everything later. With `a` at its end it runs on that very capability only, with `f` on its
    family. An empty list says nothing, and refuses nothing.
    """
    runs = [_runs(match.groups(), capability) for a in arch_list if (match := _ARCH.fullmatch(a))]
    return any(runs) or not runs


def has_machine_code_for(capability: tuple[int, int], arch_list: Sequence[str]) -> bool:
    """Whether a card runs some kernels without the driver compiling them. An empty list says
    nothing, and refuses nothing."""
    machine_code = [arch for arch in arch_list if arch.startswith("sm_")]
    return not arch_list or (bool(machine_code) and has_code_for(capability, machine_code))


def _runs(arch: tuple[str | None, ...], capability: tuple[int, int]) -> bool:
    kind, major, minor, suffix = arch
    compiled = (int(major or 0), int(minor or 0))
    if suffix == "a":
        return compiled == capability
    if kind == "compute" and not suffix:
        return compiled <= capability
    return compiled[0] == capability[0] and compiled[1] <= capability[1]


# Which driver a CUDA needs, and which builds of torch a driver and a card allow.

# NVIDIA, "CUDA Compatibility", section "Minor Version Compatibility", and the release notes of the
# CUDA toolkit, table "Minimum Required Driver Version for CUDA Minor Version Compatibility", on
# Linux and on Windows.
_MINIMUM_DRIVERS = {11: ("450.80.02", "452.39"), 12: ("525.60.13", "528.33"), 13: ("580", "580")}

_MAXWELL_TO_HOPPER = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
_VOLTA_TO_BLACKWELL = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
_TURING_TO_BLACKWELL = _VOLTA_TO_BLACKWELL[1:]
# PyTorch, RELEASE.md, "PyTorch CUDA Support Matrix", Linux x86 and Windows (pytorch/pytorch#164471
# for 2.9 and 2.10, #175253 for 2.11, #182849 for 2.12, #187075 for 2.13, #194367 for 2.14); for
# 2.15, the plan in #190385 and the architectures that its wheel tells.
# torch's release -> CUDA -> the architectures of its kernels; newest first, of one release the one
# to be preferred: CUDA 13.2 was experimental up to 2.14.
_SINCE_2_12 = {
    "13.0": _TURING_TO_BLACKWELL, "12.6": _MAXWELL_TO_HOPPER, "13.2": _TURING_TO_BLACKWELL,
}  # fmt: skip
_UP_TO_2_10 = {
    "13.0": _TURING_TO_BLACKWELL, "12.8": _VOLTA_TO_BLACKWELL, "12.6": _MAXWELL_TO_HOPPER,
}  # fmt: skip
_BUILDS: dict[tuple[int, int], dict[str, tuple[str, ...]]] = {
    (2, 15): {"13.2": _TURING_TO_BLACKWELL, "13.0": _TURING_TO_BLACKWELL},
    (2, 14): _SINCE_2_12, (2, 13): _SINCE_2_12, (2, 12): _SINCE_2_12,
    (2, 11): {"13.0": _TURING_TO_BLACKWELL, "12.8": _TURING_TO_BLACKWELL,
              "12.6": _MAXWELL_TO_HOPPER},
    (2, 10): _UP_TO_2_10, (2, 9): _UP_TO_2_10,
}  # fmt: skip
INDEX = "https://download.pytorch.org/whl"  # has a folder for each tag (pytorch.org, Start Locally)
OLDEST_TORCH, NEWEST_TORCH = min(_BUILDS), max(_BUILDS)


@dataclass(frozen=True)
class Build:
    """A published build of torch: (2, 13) for CUDA "12.6"."""

    release: tuple[int, int]
    cuda: str

    def __str__(self) -> str:
        return f"torch {version_text(self.release)} for CUDA {self.cuda} ({self.tag})"

    @property
    def tag(self) -> str:
        """How PyTorch names it: cu126."""
        return f"cu{self.cuda.replace('.', '')}"


def parse_version(text: str) -> tuple[int, ...]:
    """ "525.60.13" as (525, 60, 13), so that versions compare; () where there is no number."""
    numbers = re.split("[^0-9.]", text, maxsplit=1)[0].split(".")
    return tuple(int(number) for number in numbers if number)


def version_text(version: tuple[int, ...]) -> str:
    """(2, 13) as "2.13"."""
    return ".".join(map(str, version))


def minimum_driver(cuda: str, windows: bool = False) -> str | None:
    """The oldest driver that runs programs built for `cuda`; None where the table has no row."""
    row = _MINIMUM_DRIVERS.get((parse_version(cuda) or (0,))[0])
    return row[windows] if row else None


def driver_runs(driver: str, cuda: str, windows: bool = False) -> bool | None:
    """Whether `driver` is new enough for `cuda`; None where one of them is not known."""
    needed, version = minimum_driver(cuda, windows), parse_version(driver)
    return version >= parse_version(needed) if needed and version else None


def fitting_build(
    driver: str, capability: tuple[int, int] | None, torch_version: str, windows: bool = False
) -> Build | None:
    """The build to install that fits the driver and the card: of `torch_version` if it has one,
    else of the newest release that has one."""
    release = parse_version(torch_version)[:2]
    builds = [Build(known, cuda) for known, builds in _BUILDS.items() for cuda in builds]
    # In order: this release, then the newest of the others.
    for build in sorted(builds, key=lambda build: build.release != release):
        arch_list = _BUILDS[build.release][build.cuda]
        if driver_runs(driver, build.cuda, windows) is False:
            continue
        if capability is None or has_code_for(capability, arch_list):
            return build
    return None


def lacking_kernels(capability: tuple[int, int] | None) -> str | None:
    """What to say where the torch installed here has no kernels for a card; None where it has, or
    is of no CUDA or none that the table knows. Imports no torch."""
    version, cuda = installed_version("torch"), installed_build() or ""
    known = {version_text(release): builds for release, builds in _BUILDS.items()}
    arch_list = known.get(version_text(parse_version(version)[:2]), {}).get(cuda)
    if capability is None or arch_list is None or has_code_for(capability, arch_list):
        return None
    build = fitting_build("", capability, version)
    of_card = f"compute capability {capability[0]}.{capability[1]}"
    here = f"torch {version} for CUDA {cuda}, which is installed here, has no kernels for {of_card}"
    return f"{here}: install {build}" if build else here


@cache
def installed_build() -> str | None:
    """What the installed torch was built for: "12.8" (CUDA), "rocm6.4", "cpu"; None without torch.

    Read from the file torch/version.py, because importing torch takes seconds.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    for name, prefix in (("cuda", ""), ("hip", "rocm")):
        if told := re.search(rf"^{name}\b[^=\n]*= *['\"]([^'\"]+)['\"]", text, re.MULTILINE):
            return prefix + told[1]
    return "cpu"
