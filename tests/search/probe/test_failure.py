"""How a failure is recognised: texts of libraries, chains of errors, the device's free memory."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch._inductor.exc import InductorError

from planner.core import failures
from planner.core.errors import UnsupportedError
from planner.core.units import GIB, MIB
from search.probe import failure
from search.probe.protocol import Report
from search.probe.worker import measure, verdict
from search.probe.worker.verdict import MemoryReading, classify
from tests.search.probes import request_of

AMPLE = MemoryReading(free_bytes=60 * GIB, total_bytes=80 * GIB)
SHORT = MemoryReading(free_bytes=90 * MIB, total_bytes=80 * GIB)

# Each as its library writes it; planner.core.failures says where.
ALLOCATION_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.",
    "terminate called after throwing an instance of 'std::bad_alloc'",
    "CUDA out of memory. Tried to allocate 96.00 MiB. GPU 0 has a total capacity of 79.11 GiB",
    "HIP out of memory. Tried to allocate 96.00 MiB.",
    'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":1154',
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "could not create a primitive",
)
AMBIGUOUS_TEXTS = (
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasLtCreate(&handle)`",
    "GET was unable to find an engine to execute this computation",
    "FIND was unable to find an engine to execute this computation",
    "Unable to find an engine to execute this computation",
)
OTHER_TEXTS = (
    "could not create a primitive descriptor for a matmul primitive",
    "an error about memory: out of memory of the past",
    "out of resource: shared memory, Required: 294912, Hardware limit: 232448.",
    "Triton Error [CUDA]: invalid argument",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasGemmEx(handle)`",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "CUDA error: an illegal memory access was encountered",
)


def compiler_error(cause: Exception) -> InductorError:
    """What Inductor makes of an error while it compiles, loads or benchmarks a kernel."""
    return InductorError(cause, inspect.currentframe())


def test_failures_are_known_by_their_text() -> None:
    """cuDNN says of a GPU without kernels for its dtype what it says of one without memory."""
    for text in (*ALLOCATION_TEXTS, *AMBIGUOUS_TEXTS):
        assert classify(RuntimeError(text))[0] == "out_of_memory", text
        assert classify(compiler_error(RuntimeError(text)))[0] == "out_of_memory", text
    for text in ALLOCATION_TEXTS:  # a step may have asked for more than all that is free
        assert classify(RuntimeError(text), AMPLE)[0] == "out_of_memory", text
    assert classify(torch.OutOfMemoryError("Tried to allocate"), AMPLE)[0] == "out_of_memory"
    for text in OTHER_TEXTS:
        assert classify(RuntimeError(text), AMPLE)[0] == "crashed", text
        assert classify(compiler_error(RuntimeError(text)), AMPLE)[0] == "unsupported", text
    refused = UnsupportedError("no such dtype.", "Use another.")
    for error, status in ((refused, "unsupported"), (TypeError("no logits"), "crashed"),
                          (verdict.NonFiniteError("the loss is nan"), "non_finite")):  # fmt: skip
        assert classify(error, SHORT)[0] == status
    retried = MemoryReading(AMPLE.free_bytes, AMPLE.total_bytes, num_failed=1)
    for text in AMBIGUOUS_TEXTS:
        assert classify(RuntimeError(text), AMPLE)[0] == "crashed", text
        assert classify(RuntimeError(text), SHORT)[0] == "out_of_memory", text
        assert classify(RuntimeError(text), retried)[0] == "out_of_memory", text


@pytest.mark.parametrize(
    ("reading", "is_short"),
    [
        (MemoryReading(799 * MIB, 80 * GIB), True),  # a hundredth of 80 GiB is 819.2 MiB
        (MemoryReading(820 * MIB, 80 * GIB), False),
        (MemoryReading(255 * MIB, 8 * GIB), True),
        (MemoryReading(257 * MIB, 8 * GIB), False),
        (MemoryReading(7 * GIB, 8 * GIB, num_failed=2), True),
        (None, False),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_error_that_says_nothing_is_judged_by_free_memory(
    reading: MemoryReading | None, is_short: bool, compiled: bool
) -> None:
    silent = RuntimeError("operation failed due to a previous error during capture")
    status, message = classify(compiler_error(silent) if compiled else silent, reading)
    assert status == ("out_of_memory" if is_short else "unsupported" if compiled else "crashed")
    assert "previous error during capture" in message
    if reading is not None and is_short:
        assert str(reading) in message


def test_worker_reads_the_memory_of_what_fails(
    monkeypatch: pytest.MonkeyPatch, report: Report
) -> None:
    """A library's error that says nothing, at the first word to a device that is full."""

    def make_meter(device: str) -> object:
        raise RuntimeError("CUDNN_STATUS_NOT_INITIALIZED")

    stats = {"num_ooms": 1, "num_alloc_retries": 2}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (90 * MIB, 80 * GIB))
    monkeypatch.setattr(measure, "make_meter", make_meter)
    request = request_of("Tiny", precision="bf16").model_copy(update={"device": "cuda:0"})
    outcome = measure.measure(request, math.inf, report)
    assert (outcome.status, outcome.phase) == ("out_of_memory", "device")
    assert "90.00 MiB of 80.00 GiB free, 3 allocations failed" in outcome.message
    assert "CUDNN_STATUS_NOT_INITIALIZED" in outcome.message


def test_long_text_keeps_its_first_line_and_its_end() -> None:
    """InductorError's begins with the cause and ends with where; between them stands a graph."""
    text = "torch.compile failed: InductorError: the cause\n" + "graph\n" * 2000 + "at layer 7"
    short = failure.shorten(text)
    assert len(short) == 1500
    assert short.startswith("torch.compile failed: InductorError: the cause\n…\n")
    assert short.endswith("graph\nat layer 7")
    assert failure.shorten("word\n" * 9) == "word\n" * 9
    assert len(failure.shorten("x" * 5000)) == 1500
    assert failure.last_words("a\n\nb\n") == "a\nb"


def test_last_words_keep_what_nobody_caught() -> None:
    """As the C++ runtime and faulthandler print it, the backtrace of c10 between them."""
    uncaught = [
        "terminate called after throwing an instance of 'c10::OutOfMemoryError'",
        "  what():  CUDA out of memory. Tried to allocate 96.00 MiB.",
    ]
    backtrace = [f"frame #{i}: c10::Error::Error" for i in range(30)]
    lines = ["noise", *uncaught, *backtrace, "Fatal Python error: Aborted", "frame"]
    words = failure.last_words("\n".join(lines))
    assert words.splitlines() == [*uncaught, "Fatal Python error: Aborted", "frame"]
    assert failures.is_allocation_failure(words)
