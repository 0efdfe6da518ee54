"""The emulated libraries, built once by the system's C compiler and kept in the user's cache: the
installed wheels that they stand for, the C that is generated, and the build."""

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from planner.core.errors import PlannerError
from planner.core.files import cache_directory, unwritable

# The CUDA libraries and headers that an installed torch brings.

# The libraries that torch loads and that are emulated, by the beginning of their names.
LIBRARIES = (
    "libcudart.so", "libcublas.so", "libcublasLt.so", "libcudnn.so", "libcupti.so", "libnccl.so",
)  # fmt: skip
HEADERS = (
    "cuda.h", "cudaTypedefs.h", "cuda_runtime_api.h", "cublas_api.h", "cudnn.h", "nccl.h",
)  # fmt: skip
MACHINES = ("x86_64", "aarch64")


@dataclass(frozen=True)
class Wheels:
    """Installed wheels: `libraries` are files, by their names without a version; `include` are the
    folders with headers, in the order of their search; `versions` are the wheels' own."""

    libraries: dict[str, Path]
    include: tuple[Path, ...]
    versions: tuple[str, ...]

    def header(self, name: str) -> str:
        """The text of one of `HEADERS`."""
        return next(f / name for f in self.include if (f / name).exists()).read_text("utf-8")


def installed_wheels() -> Wheels:
    """The wheels beside the installed torch. Raises PlannerError where they cannot be emulated: on
    another system, without torch, for a build without CUDA, or where files are missing."""
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        raise PlannerError(
            f"a GPU is emulated on Linux on {' or '.join(MACHINES)}, and this is "
            f"{sys.platform} on {platform.machine()}.",
            "Run it on such a machine, or in a container of Linux.",
        )
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise PlannerError("torch is not installed.", "pip install torch")
    return find_wheels(Path(spec.origin).parents[1])


def find_wheels(packages: Path) -> Wheels:
    """The wheels in a folder of packages. Two layouts are known: `nvidia/cu13` holds most of CUDA
    13; in CUDA 12 each library had a folder of its own."""
    torch = _versions(packages, "torch")
    if not (packages / "torch" / "lib" / "libtorch_cuda.so").exists():
        version = next(iter(torch), "torch-").removeprefix("torch-").partition("+")[0]
        # With two equal signs pip would take the build for the CPU again.
        raise PlannerError(
            f"torch in {packages} is a build without CUDA, and an emulated GPU runs torch's own "
            "CUDA code.",
            f"pip install --force-reinstall torch==={version or '2.15.0'} takes PyPI's own build.",
        )
    libraries = {
        name: path
        for name in (*LIBRARIES, *DESCRIBED)
        for path in packages.glob(f"nvidia/*/lib/{name}.*")
    }
    # The folder crt/, which nvidia-cuda-runtime leaves to another wheel, comes with Triton.
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
    """The architectures that the installed torch has kernels for, as `torch.cuda.get_arch_list`
    returns them; () where they are not known."""
    spec = importlib.util.find_spec("torch")
    library = Path(spec.origin or "" if spec else "").parent / "lib" / "libtorch_python.so"
    text = library.read_bytes() if library.exists() else b""
    flags = re.search(rb"\0(sm_\d+\w?(?: (?:sm|compute)_\d+\w?)+)\0", text)
    return tuple(flags.group(1).decode().split()) if flags else ()


def _versions(packages: Path, name: str) -> list[str]:
    """`torch-2.13.0`, from the names of folders: reading the metadata of all wheels takes
    longer."""
    return sorted(path.stem for path in packages.glob(f"{name}-*.dist-info"))


# C for every function of a CUDA library, weak, so that our sources' own takes its place: from the
# installed headers for the driver, which no wheel brings, and from the libraries themselves for the
# rest.
#
# A function whose results are not known here fails, and says that it is not emulated: no program
# reads a result that nobody wrote.

HEAD = '#include <stddef.h>\n#define EXPORT __attribute__((visibility("default"), weak))\n'

USED = (
    "#include <stdlib.h>\n"
    "int emulated_missing(const char *);\nint emulated_success(const char *);\n"
    "int emulated_refused(const char *, int);\nint emulated_blas_call(void *);\n"
)
# CUDA_ERROR_NOT_SUPPORTED, cudaErrorNotSupported, CUDNN_STATUS_NOT_SUPPORTED,
# CUBLAS_STATUS_NOT_SUPPORTED, ncclInvalidUsage, CUFFT_NOT_SUPPORTED, CUSOLVER_STATUS_NOT_SUPPORTED,
# CUSPARSE_STATUS_NOT_SUPPORTED: each of the library's header.
REFUSALS = {
    "libcuda.so": 801, "libcudart.so": 801, "libcudnn.so": 3000, "libcublas.so": 15,
    "libcublasLt.so": 15, "libnccl.so": 5, "libcufft.so": 16, "libcusolver.so": 9,
    "libcusparse.so": 10,
}  # fmt: skip
OPTIONAL = ("cuLogsRegisterCallback",)  # torch calls it, and does without
# Functions that only change an object of the library, or compute values on the card. Any other may
# return something.
WITHOUT_RESULTS = {
    "libcudnn.so": r"cudnn(Set|Destroy|Convolution|BatchNormalization|RNN[FB]|CTCLoss|SpatialTf"
    r"|Pooling|Activation|Softmax|OpTensor|AddTensor|TransformTensor|Dropout[FB]|Restore)",
    "libcublas.so": r"cublas(Set|Gemm|Dot|Axpy|Scal|Nrm2|Rot|I?[SDCZHTU])",
    "libcublasLt.so": r"cublasLt\w*(Set|Destroy|Check|Init)",
    "libnccl.so": r"ncclComm(Resume|Suspend|Revoke|Deregister|WindowDeregister)",
}
# Libraries whose prototypes tell enough of their functions, with their headers.
DESCRIBED = {
    "libcufft.so": ("cufft.h", "cufftXt.h"),
    "libcusolver.so": ("cusolverDn.h",),
    "libcusparse.so": ("cusparse.h",),
}
# Sizes of scratch are 0, as cuDNN's and cuBLAS's are; a created object is ours. Sizes of results
# that depend on values are not known.
_SIZE = re.compile(r"l_?work|work_?size|workspaceInBytes|buffer_?size", re.IGNORECASE)
_BY_VALUES = re.compile(r"Get(?!ErrorString)|Nnz|zeroPivot|_nnz|SpGEMM|Csr2|csr2csc|Dense")

# `cuGraphInstantiate` of CUDA 12 is another function, and no second version of the first.
RENAMED = {("cuGraphInstantiate", 12000): "cuGraphInstantiateWithFlags"}


def stubs(library: str, functions: Iterable[str], headers: str = "") -> str:
    """A definition of each of `functions`; `headers` are those of a library in DESCRIBED."""
    described = dict(_described(headers)) if library in DESCRIBED else {}
    lines = [described.get(name) or _stub(library, name) for name in sorted(functions)]
    return "\n".join([HEAD, USED, *lines, ""])


def _stub(library: str, name: str) -> str:
    """The definition of a function of which only the name is known."""
    if name in OPTIONAL:
        return f'EXPORT int {name}(void) {{ return emulated_missing("{name}"); }}'
    if library == "libcupti.so":  # CUPTI_ERROR_NOT_SUPPORTED of cupti_result.h: nothing is profiled
        return f"EXPORT int {name}(void) {{ return 27; }}"
    if not re.match(WITHOUT_RESULTS.get(library, "$"), name):
        refused = f'emulated_refused("{name}", {REFUSALS[library]})'
        return f"EXPORT int {name}(void) {{ return {refused}; }}"
    if library == "libcublas.so":  # work of the handle's stream
        return f"EXPORT int {name}(void *handle) {{ return emulated_blas_call(handle); }}"
    return f'EXPORT int {name}(void) {{ return emulated_success("{name}"); }}'


def _described(headers: str) -> Iterable[tuple[str, str]]:
    """(function, its definition) of each prototype whose results are sizes of scratch, new objects,
    or nothing."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", headers, flags=re.DOTALL)
    for name, listed in re.findall(r"\b(cu(?:fft|solver|sparse)\w+)\s*\(([^(){};]*)\)\s*;", text):
        if _BY_VALUES.search(name):
            continue
        parameters, body = [], f'return emulated_success("{name}");'
        for index, parameter in enumerate(filter(None, map(str.strip, listed.split(",")))):
            kind, called = re.sub(r"\w+\W*$", "", parameter), re.findall(r"\w+", parameter)[-1]
            is_pointer = "*" in parameter or "[" in parameter
            is_result = is_pointer and "const" not in kind and kind.count("*") == 1
            if is_result and _SIZE.search(called):
                width = "int" if kind.split()[0] in ("int", "int*") else "size_t"
                body = f"if (p{index}) *({width} *)p{index} = 0; {body}"
            elif is_result and index == 0 and "reate" in name:
                create = "(int *)p0 = 1" if "cufft" in name else "(void **)p0 = calloc(1, 1024)"
                body = f"*{create}; {body}"
            number = kind.split()[0] if kind.split()[:1] in (["float"], ["double"]) else "long"
            parameters.append(f"{'void *' if is_pointer else number} p{index}")
        yield name, f"EXPORT int {name}({', '.join(parameters) or 'void'}) {{ {body} }}"


def driver_functions(header: str) -> set[str]:
    """The names that `cuda.h` declares; where a macro gives one a version, both."""
    declared = set(re.findall(r"\bCUDAAPI\s+(cu[A-Z]\w+)\s*\(", header))
    renamed = dict(re.findall(r"#define\s+(cu[A-Z]\w+)\s+(cu[A-Z]\w+_v\d+)\s", header))
    return declared | {renamed[name] for name in declared if name in renamed}


def driver_versions(typedefs: str) -> list[tuple[str, int, str]]:
    """(function, CUDA version, symbol) of the functions that changed, oldest first, from
    `cudaTypedefs.h`: the n-th version of a function has the symbol `function_vn`."""
    versions: dict[str, set[int]] = defaultdict(set)
    for name, version in re.findall(r"\bPFN_(cu[A-Z]\w*?)_v(\d{4,5})\)", typedefs):
        versions[name].add(int(version))
    return [
        (name, version, RENAMED.get((name, version), f"{name}_v{n}" if n > 1 else name))
        for name, numbers in sorted(versions.items())
        if len(numbers) > 1
        for n, version in enumerate(sorted(numbers), start=1)
    ]


def driver_tables(header: str, typedefs: str) -> str:
    """The stubs of the driver, and the tables by which cuGetProcAddress finds its functions."""
    entries = sorted(driver_functions(header) | set(RENAMED.values()))
    lines = [
        stubs("libcuda.so", entries),
        "const struct { const char *name; void *function; } emulated_entries[] = {",
        *(f'    {{"{name}", (void *){name}}},' for name in entries),
        "};",
        f"const size_t emulated_num_entries = {len(entries)};",
        "const struct { const char *name; int version; const char *symbol; } "
        "emulated_versions[] = {",
    ]
    versions = driver_versions(typedefs)
    lines += [f'    {{"{name}", {number}, "{symbol}"}},' for name, number, symbol in versions]
    return "\n".join([*lines, "};", f"const size_t emulated_num_versions = {len(versions)};", ""])


def defined_symbols(listing: str) -> set[str]:
    """The functions that `nm --defined-only` lists, without their versions."""
    rows = (line.split() for line in listing.splitlines())
    names = {row[2].partition("@")[0] for row in rows if len(row) == 3 and row[1] in "TW"}
    return names - {"_init", "_fini"}


def symbol_version(listing: str) -> str:
    """The version that a library gives all its symbols; "" where it gives none."""
    match = re.search(r" [TW] \w+@@?(\S+)", listing)
    return match.group(1) if match else ""


SOURCE = Path(__file__).with_name("source")
# The sources of each library, the driver first: the others call it.
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
    **dict.fromkeys(DESCRIBED, ()),
}
NVML_FOLDER = "nvml"  # apart, so that a machine may be without it
GENERATED = "generated"  # until all is built
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
        try:
            _build(compiler, wheels, beside)
            _move_into_place(beside, folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except OSError as error:  # a full disk, while it is built
        raise unwritable(folder.parent, error, "set PLANNER_CACHE_DIR to another folder") from error
    return folder


def build_key(wheels: Wheels) -> str:
    """A digest of torch, the wheels of CUDA, our sources and the kind of processor."""
    digest = hashlib.sha256(repr((wheels.versions, platform.machine(), FLAGS)).encode())
    for path in (*sorted(SOURCE.iterdir()), Path(__file__)):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:20]


def _move_into_place(beside: Path, folder: Path) -> None:
    """Renames the folder, unless another process has built the same meanwhile."""
    try:
        beside.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _build(compiler: str, wheels: Wheels, folder: Path) -> None:
    (folder / NVML_FOLDER).mkdir()
    (folder / GENERATED).mkdir()
    version = f"-DCUBLAS_VERSION={_blas_version(wheels)}"
    command = [compiler, *FLAGS, version, *(f"-I{path}" for path in wheels.include)]
    driver, *others = (name for name in PARTS if name in wheels.libraries or PARTS[name])
    _build_library(command, wheels, folder, driver)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for built in [pool.submit(_build_library, command, wheels, folder, n) for n in others]:
            built.result()
    shutil.rmtree(folder / GENERATED)
    (folder / "libcuda.so").symlink_to("libcuda.so.1")  # what a linker's -lcuda looks for


def _build_library(command: list[str], wheels: Wheels, folder: Path, library: str) -> None:
    """Builds a library, with the name and the symbols' version of the real one."""
    real = wheels.libraries.get(library)
    soname = real.name if real else f"{library}.1"
    output = (folder / NVML_FOLDER if library == "libnvidia-ml.so" else folder) / soname
    generated = folder / GENERATED / f"{library}.c"
    sources, options = [SOURCE / part for part in PARTS[library]], [f"-Wl,-soname,{soname}"]
    if library == "libcuda.so":
        tables = driver_tables(wheels.header("cuda.h"), wheels.header("cudaTypedefs.h"))
        generated.write_text(tables)
        sources.append(generated)
    elif real:
        listing = _run(["nm", "-D", "--defined-only", str(real)])
        headers = "".join(wheels.header(name) for name in DESCRIBED.get(library, ()))
        generated.write_text(stubs(library, defined_symbols(listing), headers))
        sources.append(generated)
        options += [f"-L{folder}", "-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed", "-l:libcuda.so.1"]
        if version := symbol_version(listing):
            script = folder / GENERATED / f"{library}.map"
            script.write_text(f"{version} {{ global: *; }};\n")
            options.append(f"-Wl,--version-script={script}")
    output_options = ["-shared", "-Wl,-z,defs", "-lpthread", "-o", str(output)]
    _run([*command, *map(str, sources), *options, *output_options])


def _blas_version(wheels: Wheels) -> int:
    """The number that cublasGetVersion returns. blas.c cannot include the header, which has C++
    types."""
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
