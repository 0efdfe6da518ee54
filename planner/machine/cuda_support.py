"""Which driver a CUDA needs, and which builds of torch a driver and a card allow.

Sources. Drivers: NVIDIA, "CUDA Compatibility", section "Minor Version Compatibility", and the
release notes of the CUDA toolkit, table "Minimum Required Driver Version for CUDA Minor Version
Compatibility" (11.x: 450.80.02 on Linux, 452.39 on Windows; 12.x: 525.60.13 and 528.33; 13.x: 580).
Builds: PyTorch, RELEASE.md, "PyTorch CUDA Support Matrix", Linux x86 and Windows
(pytorch/pytorch#164471 for 2.9 and 2.10, #175253 for 2.11, #182849 for 2.12, #187075 for 2.13,
#194367 for 2.14); for 2.15, the plan in #190385 and the architectures that its wheel tells.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from planner.core.torch_version import installed_torch
from planner.machine.torch_build import has_code_for

_MINIMUM_DRIVERS = {11: ("450.80.02", "452.39"), 12: ("525.60.13", "528.33"), 13: ("580", "580")}

_MAXWELL_TO_HOPPER = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
_VOLTA_TO_BLACKWELL = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
_TURING_TO_BLACKWELL = _VOLTA_TO_BLACKWELL[1:]
# torch's release -> CUDA -> the architectures of its kernels; newest first, of one release the one
# to be preferred: CUDA 13.2 was experimental up to 2.14.
_BUILDS: dict[tuple[int, int], dict[str, tuple[str, ...]]] = {
    (2, 15): {"13.2": _TURING_TO_BLACKWELL, "13.0": _TURING_TO_BLACKWELL},
    (2, 14): {"13.0": _TURING_TO_BLACKWELL, "12.6": _MAXWELL_TO_HOPPER,
              "13.2": _TURING_TO_BLACKWELL},
    (2, 13): {"13.0": _TURING_TO_BLACKWELL, "12.6": _MAXWELL_TO_HOPPER,
              "13.2": _TURING_TO_BLACKWELL},
    (2, 12): {"13.0": _TURING_TO_BLACKWELL, "12.6": _MAXWELL_TO_HOPPER,
              "13.2": _TURING_TO_BLACKWELL},
    (2, 11): {"13.0": _TURING_TO_BLACKWELL, "12.8": _TURING_TO_BLACKWELL,
              "12.6": _MAXWELL_TO_HOPPER},
    (2, 10): {"13.0": _TURING_TO_BLACKWELL, "12.8": _VOLTA_TO_BLACKWELL,
              "12.6": _MAXWELL_TO_HOPPER},
    (2, 9): {"13.0": _TURING_TO_BLACKWELL, "12.8": _VOLTA_TO_BLACKWELL,
             "12.6": _MAXWELL_TO_HOPPER},
}  # fmt: skip
INDEX = "https://download.pytorch.org/whl"  # has a folder for each tag (pytorch.org, Start Locally)
OLDEST_TORCH, NEWEST_TORCH = min(_BUILDS), max(_BUILDS)


@dataclass(frozen=True)
class Build:
    """A published build of torch: (2, 13) for CUDA "12.6"."""

    release: tuple[int, int]
    cuda: str

    def __str__(self) -> str:
        return f"torch {as_text(self.release)} for CUDA {self.cuda} ({self.tag})"

    @property
    def tag(self) -> str:
        """How PyTorch names it: cu126."""
        return f"cu{self.cuda.replace('.', '')}"


def parse_version(text: str) -> tuple[int, ...]:
    """ "525.60.13" as (525, 60, 13), so that versions compare; () where there is no number."""
    parts: list[int] = []
    for part in text.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


def as_text(version: tuple[int, ...]) -> str:
    """(2, 13) as "2.13"."""
    return ".".join(map(str, version))


def minimum_driver(cuda: str, windows: bool = False) -> str | None:
    """The oldest driver that runs programs built for `cuda`; None where the table has no row."""
    row = _MINIMUM_DRIVERS.get((parse_version(cuda) or (0,))[0])
    return row[windows] if row else None


def driver_runs(driver: str, cuda: str, windows: bool = False) -> bool | None:
    """Whether `driver` is new enough for `cuda`; None where one of them is not known."""
    needed = minimum_driver(cuda, windows)
    known = parse_version(driver)
    return known >= parse_version(needed) if needed and known else None


def fitting_build(
    driver: str, capability: tuple[int, int] | None, torch_version: str, windows: bool = False
) -> Build | None:
    """The build to install: of this very release of torch where one fits the driver and the card,
    else of the newest release that has one."""
    release = parse_version(torch_version)[:2]
    # In order: this release, then the newest of the others.
    for build in sorted(_all_builds(), key=lambda build: build.release != release):
        arch_list = _BUILDS[build.release][build.cuda]
        if driver_runs(driver, build.cuda, windows) is False:
            continue
        if capability is None or has_code_for(capability, arch_list):
            return build
    return None


def lacking_kernels(capability: tuple[int, int] | None) -> str | None:
    """What to say where the torch installed here has no kernels for a card; None where it has, or
    is of no CUDA or none that the table knows. Imports no torch."""
    version, cuda = installed_torch(), installed_build() or ""
    known = {as_text(release): builds for release, builds in _BUILDS.items()}
    arch_list = known.get(as_text(parse_version(version)[:2]), {}).get(cuda)
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


def _all_builds() -> Iterator[Build]:
    for release, builds in _BUILDS.items():
        for cuda in builds:
            yield Build(release, cuda)
