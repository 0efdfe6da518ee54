"""C for every entry point of a CUDA library that our sources leave out: from the installed headers
for the driver, which no wheel brings, and from the libraries themselves for the rest."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable

HEAD = '#include <stddef.h>\n#define EXPORT __attribute__((visibility("default")))\n'

# What a stub of each library does, as C: the driver and the runtime do not know it; of cuBLAS it is
# work of the handle's stream; nothing is to be profiled (CUPTI_ERROR_NOT_SUPPORTED of
# cupti_result.h); the others are taken to have done it.
BODIES = {
    "libcuda.so": '(void) { return emulated_missing("%s"); }',
    "libcudart.so": '(void) { return emulated_missing("%s"); }',
    "libcublas.so": "(void *handle) { return emulated_blas_call(handle); } // %s",
    "libcublasLt.so": '(void) { return emulated_success("%s"); }',
    "libcudnn.so": '(void) { return emulated_success("%s"); }',
    "libcupti.so": "(void) { return 27; } // %s",
    "libnccl.so": '(void) { return emulated_success("%s"); }',
}
USED = (
    "int emulated_missing(const char *);\nint emulated_success(const char *);\n"
    "int emulated_blas_call(void *);\n"
)

# `cuGraphInstantiate` of CUDA 12 is another function, and no second version of the first.
RENAMED = {("cuGraphInstantiate", 12000): "cuGraphInstantiateWithFlags"}


def stubs(library: str, missing: Iterable[str]) -> str:
    """A definition of each of `missing`."""
    body = BODIES[library]
    lines = [f"EXPORT int {name}{body % name}" for name in sorted(missing)]
    return "\n".join([HEAD, USED, *lines, ""])


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
