"""The generated C: which functions and versions a header and a library have."""

from __future__ import annotations

from planner.machine.emulated.stubs import (
    defined_symbols,
    driver_functions,
    driver_tables,
    driver_versions,
    stubs,
    symbol_version,
)

HEADER = """
#define cuThing                     cuThing_v2
CUresult CUDAAPI cuThing(int *a);
CUresult CUDAAPI cuOther(void);
CUresult CUDAAPI cuThird(void);
"""
TYPEDEFS = """
typedef CUresult (CUDAAPI *PFN_cuThing_v2000)(int *a);
typedef CUresult (CUDAAPI *PFN_cuThing_v3020)(int *a);
typedef CUresult (CUDAAPI *PFN_cuOther_v2000)(void);
"""
LISTING = """0000000000024c40 T cudaFree@@libcudart.so.13
0000000000024db0 T cudaMalloc@@libcudart.so.13
                 U free@GLIBC_2.2.5
0000000000000000 A libcudart.so.13
"""


def test_a_function_that_a_macro_renames_has_both_names() -> None:
    assert driver_functions(HEADER) == {"cuThing", "cuThing_v2", "cuOther", "cuThird"}


def test_the_nth_version_of_a_function_has_the_suffix_n() -> None:
    assert driver_versions(TYPEDEFS) == [
        ("cuThing", 2000, "cuThing"),
        ("cuThing", 3020, "cuThing_v2"),
    ]


def test_what_is_defined_is_no_stub_and_all_can_be_found() -> None:
    text = driver_tables({"cuThing_v2", "cuOther"}, HEADER, TYPEDEFS)
    assert 'int cuThird(void) { return emulated_refused("cuThird", 801); }' in text
    assert 'emulated_refused("cuOther"' not in text
    assert "emulated_num_entries = 4;" in text
    found = [line.split('"')[1] for line in text.splitlines() if "(void *)cu" in line]
    assert found == sorted(found)  # the driver searches by halves


def test_symbols_and_their_version_are_read_off_a_library() -> None:
    assert defined_symbols(LISTING) == {"cudaFree", "cudaMalloc"}
    assert symbol_version(LISTING) == "libcudart.so.13"
    assert symbol_version("00 T ncclSend\n") == ""


def test_a_library_whose_calls_are_work_gets_stubs_that_work() -> None:
    assert "int cublasSaxpy_v2(void *handle) { return emulated_blas_call(handle); }" in stubs(
        "libcublas.so", ["cublasSaxpy_v2"]
    )
