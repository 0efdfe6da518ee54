"""The emulated libraries, built once by the system's C compiler and kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from planner.core.errors import PlannerError
from planner.core.files import cache_directory, unwritable
from planner.machine.emulated import stubs
from planner.machine.emulated.wheels import Wheels, installed_wheels

SOURCE = Path(__file__).with_name("source")
# What each library is made of, the driver first: the others call it.
MACHINE = ("configuration.c", "table.c")
PARTS = {
    "libcuda.so": (*MACHINE, *(p.name for p in sorted(SOURCE.glob("driver_*.c")))),
    "libnvidia-ml.so": (*MACHINE, "nvml.c"),
    "libcudart.so": tuple(p.name for p in sorted(SOURCE.glob("runtime*.c"))),
    "libcublas.so": ("blas.c",),
    "libcublasLt.so": ("blas_lt.c",),
    "libcudnn.so": ("dnn.c", "dnn_recurrent.c"),
    "libcupti.so": ("cupti.c",),
    "libnccl.so": ("nccl.c",),
    **dict.fromkeys(stubs.DESCRIBED, ()),
}
NVML_FOLDER = "nvml"  # apart, so that a machine may be without it
FLAGS = ("-O2", "-fPIC", "-fvisibility=hidden", "-Werror=implicit-function-declaration")


def built_libraries() -> Path:
    """The folder with the libraries for the installed torch, built where it is not there yet.
    Raises PlannerError."""
    wheels = installed_wheels()
    folder = cache_directory() / "emulated" / build_key(wheels)
    if folder.is_dir():
        return folder
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None or shutil.which("nm") is None:
        raise PlannerError(
            "an emulated GPU is built by a C compiler: there is no cc, gcc or clang, or no nm.",
            "Install one: on Debian and Ubuntu, apt-get install gcc libc6-dev",
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
    except OSError as error:
        raise unwritable(folder.parent, error, "set PLANNER_CACHE_DIR") from error
    try:
        _build(compiler, wheels, beside)
        _move_into_place(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder


def build_key(wheels: Wheels) -> str:
    """Differs where torch, the wheels of CUDA, our sources or the processor do."""
    digest = hashlib.sha256(repr((wheels.versions, platform.machine(), FLAGS)).encode())
    for path in (*sorted(SOURCE.iterdir()), Path(__file__), Path(stubs.__file__)):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:20]


def _move_into_place(beside: Path, folder: Path) -> None:
    """Of two processes that build the same, the second finds the first one's."""
    try:
        beside.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _build(compiler: str, wheels: Wheels, folder: Path) -> None:
    objects = folder / "objects"
    objects.mkdir()
    (folder / NVML_FOLDER).mkdir()
    names = sorted({name for parts in PARTS.values() for name in parts})
    version = f"-DCUBLAS_VERSION={_blas_version(wheels)}"
    command = [compiler, *FLAGS, version, *(f"-I{path}" for path in wheels.include), "-c"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        paths = list(pool.map(lambda name: _compile(command, SOURCE / name, objects), names))
    by_name = dict(zip(names, paths, strict=True))
    for library, parts in PARTS.items():
        if library in stubs.DESCRIBED and library not in wheels.libraries:
            continue
        _link(compiler, wheels, folder, library, [by_name[part] for part in parts])
    shutil.rmtree(objects)
    (folder / "libcuda.so").symlink_to("libcuda.so.1")  # what a linker's -lcuda looks for


def _compile(command: list[str], source: Path, objects: Path) -> Path:
    made = objects / f"{source.stem}.o"
    _run([*command, str(source), "-o", str(made)])
    return made


def _link(compiler: str, wheels: Wheels, folder: Path, library: str, parts: list[Path]) -> None:
    """One library, under the name and with the symbols' version of the real one."""
    real = wheels.libraries.get(library)
    soname = real.name if real else f"{library}.1"
    made = (folder / NVML_FOLDER if library == "libnvidia-ml.so" else folder) / soname
    command = [compiler, "-shared", f"-Wl,-soname,{soname}", "-o", str(made), *map(str, parts)]
    generated = folder / "objects" / f"{library}.generated.c"
    if library == "libcuda.so":
        generated.write_text(_driver_stubs(wheels, parts))
        command.append(str(generated))
    elif real:
        listing = _run(["nm", "-D", "--defined-only", str(real)])
        known = _run(["nm", "--defined-only", *map(str, parts)]) if parts else ""
        missing = stubs.defined_symbols(listing) - stubs.defined_symbols(known)
        headers = "".join(wheels.header(name) for name in stubs.DESCRIBED.get(library, ()))
        generated.write_text(stubs.stubs(library, missing - {"_init", "_fini"}, headers))
        command += [str(generated), f"-L{folder}", "-Wl,-rpath,$ORIGIN"]
        command += ["-Wl,--no-as-needed", "-l:libcuda.so.1"]
        if version := stubs.symbol_version(listing):
            script = folder / "objects" / f"{library}.map"
            script.write_text(f"{version} {{ global: *; }};\n")
            command.append(f"-Wl,--version-script={script}")
    _run([*command, *FLAGS, "-Wl,-z,defs", "-lpthread"])


def _driver_stubs(wheels: Wheels, parts: list[Path]) -> str:
    defined = stubs.defined_symbols(_run(["nm", "--defined-only", *map(str, parts)]))
    functions = {name for name in defined if name.startswith("cu")}
    return stubs.driver_tables(functions, wheels.header("cuda.h"), wheels.header("cudaTypedefs.h"))


def _blas_version(wheels: Wheels) -> int:
    """As cublasGetVersion gives it. blas.c cannot include the header, whose types are C++'s."""
    numbers = re.findall(
        r"#define CUBLAS_VER_(?:MAJOR|MINOR|PATCH)\s+(\d+)", wheels.header("cublas_api.h")
    )
    major, minor, patch = map(int, numbers)
    return 10_000 * major + 100 * minor + patch


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PlannerError(
            f"the emulated GPU cannot be built: {' '.join(command[:2])} … failed.\n{done.stderr}",
            "Report it with the versions of torch and of the compiler.",
        )
    return done.stdout
