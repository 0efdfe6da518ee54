"""C for every entry point of a CUDA library that our sources leave out: from the installed headers
for the driver, which no wheel brings, and from the libraries themselves for the rest.

Nothing that a program reads is left as it was: what has results that are not known here fails, and
says that it is not emulated.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable

HEAD = '#include <stddef.h>\n#define EXPORT __attribute__((visibility("default")))\n'

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
UNHEEDED = ("cuLogsRegisterCallback",)  # torch asks, and does without
# What only changes an object of the library, or computes values on the card, of which there are
# none. Everything else may hand something back.
WITHOUT_RESULTS = {
    "libcudnn.so": r"cudnn(Set|Destroy|Convolution|BatchNormalization|RNN[FB]|CTCLoss|SpatialTf"
    r"|Pooling|Activation|Softmax|OpTensor|AddTensor|TransformTensor|Dropout[FB]|Restore)",
    "libcublas.so": r"cublas(Set|Gemm|Dot|Axpy|Scal|Nrm2|Rot|I?[SDCZHTU])",
    "libcublasLt.so": r"cublasLt\w*(Set|Destroy|Check|Init)",
    "libnccl.so": r"ncclComm(Resume|Suspend|Revoke|Deregister|WindowDeregister)",
}
# Libraries whose functions are described well enough by their prototypes: headers of each.
DESCRIBED = {
    "libcufft.so": ("cufft.h", "cufftXt.h"),
    "libcusolver.so": ("cusolverDn.h",),
    "libcusparse.so": ("cusparse.h",),
}
# Sizes of scratch are 0, as cuDNN's and cuBLAS's are; what is created is an object of ours. Sizes
# of results that depend on values are not known.
_SIZE = re.compile(r"l_?work|work_?size|workspaceInBytes|buffer_?size", re.IGNORECASE)
_BY_VALUES = re.compile(r"Get(?!ErrorString)|Nnz|zeroPivot|_nnz|SpGEMM|Csr2|csr2csc|Dense")

# `cuGraphInstantiate` of CUDA 12 is another function, and no second version of the first.
RENAMED = {("cuGraphInstantiate", 12000): "cuGraphInstantiateWithFlags"}


def stubs(library: str, missing: Iterable[str], headers: str = "") -> str:
    """A definition of each of `missing`; `headers` are those of a library in DESCRIBED."""
    described = dict(_described(headers)) if library in DESCRIBED else {}
    lines = [described.get(name) or _stub(library, name) for name in sorted(missing)]
    return "\n".join([HEAD, USED, *lines, ""])


def _stub(library: str, name: str) -> str:
    """A function of which only the name is known."""
    if name in UNHEEDED:
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
        for index, given in enumerate(filter(None, map(str.strip, listed.split(",")))):
            kind, called = re.sub(r"\w+\W*$", "", given), re.findall(r"\w+", given)[-1]
            is_pointer = "*" in given or "[" in given
            is_result = is_pointer and "const" not in kind and kind.count("*") == 1
            if is_result and _SIZE.search(called):
                width = "int" if kind.split()[0] in ("int", "int*") else "size_t"
                body = f"if (p{index}) *({width} *)p{index} = 0; {body}"
            elif is_result and index == 0 and "reate" in name:
                made = "(int *)p0 = 1" if "cufft" in name else "(void **)p0 = calloc(1, 1024)"
                body = f"*{made}; {body}"
            number = kind.split()[0] if kind.split()[:1] in (["float"], ["double"]) else "long"
            parameters.append(f"{'void *' if is_pointer else number} p{index}")
        yield name, f"EXPORT int {name}({', '.join(parameters) or 'void'}) {{ {body} }}"


def driver_functions(header: str) -> set[str]:
    """The names that `cuda.h` declares; where a macro gives one a version, both."""
    declared = set(re.findall(r"\bCUDAAPI\s+(cu[A-Z]\w+)\s*\(", header))
    renamed = dict(re.findall(r"#define\s+(cu[A-Z]\w+)\s+(cu[A-Z]\w+_v\d+)\s", header))
    return declared | {renamed[name] for name in declared if name in renamed}


def driver_versions(typedefs: str) -> list[tuple[str, int, str]]:
    """(function, CUDA version, symbol) of those that changed, oldest first, as `cudaTypedefs.h`
    tells: the n-th version of a function has the symbol `function_vn`."""
    versions: dict[str, set[int]] = defaultdict(set)
    for name, version in re.findall(r"\bPFN_(cu[A-Z]\w*?)_v(\d{4,5})\)", typedefs):
        versions[name].add(int(version))
    return [
        (name, version, RENAMED.get((name, version), f"{name}_v{n}" if n > 1 else name))
        for name, found in sorted(versions.items())
        if len(found) > 1
        for n, version in enumerate(sorted(found), start=1)
    ]


def driver_tables(defined: Collection[str], header: str, typedefs: str) -> str:
    """The stubs of the driver, and the tables by which cuGetProcAddress finds its functions."""
    missing = driver_functions(header) - set(defined)
    entries = sorted(missing | set(defined))
    lines = [stubs("libcuda.so", missing)]
    lines += [f"int {name}();" for name in sorted(defined)]
    lines += [
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
    return {row[2].partition("@")[0] for row in rows if len(row) == 3 and row[1] in "TW"}


def symbol_version(listing: str) -> str:
    """The version that a library gives all its symbols, "" where it gives none."""
    match = re.search(r" [TW] \w+@@?(\S+)", listing)
    return match.group(1) if match else ""
