"""Where the CUDA libraries and headers lie that an installed torch brings, and which they are."""

from __future__ import annotations

import importlib.util
import platform
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from planner.core.errors import PlannerError
from planner.machine.emulated import stubs

# By the name that each begins with, of the libraries that torch loads and that are emulated.
LIBRARIES = (
    "libcudart.so", "libcublas.so", "libcublasLt.so", "libcudnn.so", "libcupti.so", "libnccl.so",
)  # fmt: skip
HEADERS = (
    "cuda.h", "cudaTypedefs.h", "cuda_runtime_api.h", "cublas_api.h", "cudnn.h", "nccl.h",
)  # fmt: skip
MACHINES = ("x86_64", "aarch64")


@dataclass(frozen=True)
class Wheels:
    """`libraries` are files, by their names without a version; `include` the folders with headers,
    in the order of their search; `versions` names torch's wheel and those it came with."""

    libraries: dict[str, Path]
    include: tuple[Path, ...]
    versions: tuple[str, ...]

    def header(self, name: str) -> str:
        """The text of one of `HEADERS`."""
        return next(f / name for f in self.include if (f / name).exists()).read_text("utf-8")


def installed_wheels() -> Wheels:
    """Those beside the installed torch. Raises PlannerError where nothing there can be emulated:
    another system, no torch, a build of it without CUDA, or wheels that lack something."""
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        raise PlannerError(
            f"a GPU is emulated on Linux on {' or '.join(MACHINES)}, and this is "
            f"{sys.platform} on {platform.machine()}."
        )
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise PlannerError("torch is not installed.", "pip install torch")
    return find_wheels(Path(found.origin).parents[1])


def find_wheels(packages: Path) -> Wheels:
    """Those in a folder of packages. Two layouts are known: `nvidia/cu13` holds most of CUDA 13,
    and of CUDA 12 each library had a folder of its own."""
    torch = _versions(packages, "torch")
    if not (packages / "torch" / "lib" / "libtorch_cuda.so").exists():
        version = next(iter(torch), "torch-").removeprefix("torch-").partition("+")[0]
        # Three signs: two would take the build for the CPU again.
        raise PlannerError(
            f"torch in {packages} is a build without CUDA, and an emulated GPU runs torch's own "
            "CUDA code.",
            f"pip install --force-reinstall torch==={version or '2.15.0'} takes PyPI's own build.",
        )
    libraries = {
        name: path
        for name in (*LIBRARIES, *stubs.DESCRIBED)
        for path in packages.glob(f"nvidia/*/lib/{name}.*")
    }
    # Triton brings what nvidia-cuda-runtime leaves to another wheel: the folder crt/.
    include = (
        *sorted(packages.glob("nvidia/*/include")),
        packages / "triton" / "backends" / "nvidia" / "include",
    )
    missing = [name for name in LIBRARIES if name not in libraries]
    missing += [h for h in HEADERS if not any((folder / h).exists() for folder in include)]
    if missing:
        raise PlannerError(
            f"the packages of CUDA in {packages} lack {', '.join(missing)}.",
            "Install torch from wheels that bring CUDA: pip install --force-reinstall torch",
        )
    return Wheels(libraries, include, (*torch, *_versions(packages, "nvidia_*")))


@cache
def architectures() -> tuple[str, ...]:
    """What the installed torch has kernels for, as `torch.cuda.get_arch_list` says it; () where
    that is not known."""
    found = importlib.util.find_spec("torch")
    library = Path(found.origin or "" if found else "").parent / "lib" / "libtorch_python.so"
    text = library.read_bytes() if library.exists() else b""
    flags = re.search(rb"\0(sm_\d+\w?(?: (?:sm|compute)_\d+\w?)+)\0", text)
    return tuple(flags.group(1).decode().split()) if flags else ()


def _versions(packages: Path, name: str) -> list[str]:
    """`torch-2.13.0`: read off the folders, as importing the metadata of all takes longer."""
    return sorted(path.stem for path in packages.glob(f"{name}-*.dist-info"))
