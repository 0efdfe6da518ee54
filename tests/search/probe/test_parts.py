"""The parts of a probe that run no worker: intervals, what its processes start from, whether the
machine was quiet, and how a failure is recognised."""

import inspect
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._inductor.exc import InductorError

from planner.core import failures
from planner.core.errors import UnsupportedError
from planner.core.schema import TrainSetting
from planner.core.units import GIB, MIB
from planner.machine import torch_build
from planner.machine.host import Host
from search.probe import evidence, parent, protocol
from search.probe.device import MemoryInUse
from search.probe.evidence import QuietWatch, is_disturbed, median_interval
from search.probe.parent import (
    SPIN_ROUNDS,
    SPINS,
    THREADS,
    compile_threads,
    probe_environment,
)
from search.probe.protocol import Report
from search.probe.worker import measure, verdict
from search.probe.worker.verdict import MemoryReading, classify
from tests.search.probes import request_of
from tests.search.tables import make_record

seconds = st.floats(min_value=1e-4, max_value=1e3)


@given(st.lists(seconds, min_size=1, max_size=60))
def test_interval_encloses_the_median(samples: list[float]) -> None:
    interval = median_interval(samples)
    assert min(samples) <= interval.low <= interval.median <= interval.high <= max(samples)
    assert interval.certain == (len(samples) >= 6)  # 2 · (1/2)^6 = 3.1% and 2 · (1/2)^5 = 6.3%


@pytest.mark.parametrize("n", [6, 9, 12, 20, 50, 100])
def test_interval_has_the_ranks_of_the_sign_test(n: int) -> None:
    """The largest k with P(Binomial(n, 1/2) < k) <= 2.5%, computed here with exact integers."""
    below = [sum(math.comb(n, i) for i in range(k)) for k in range(n)]
    rank = max(k for k in range(n) if below[k] * 1000 <= 25 * 2**n)
    interval = median_interval([float(i) for i in range(1, n + 1)])
    assert (interval.low, interval.high) == (rank, n + 1 - rank)


def test_torch_build_is_read_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
    monkeypatch.setattr(torch_build, "find_spec", lambda name: spec)
    for cuda, hip, build in (("'12.8'", None, "12.8"), (None, "'6.4'", "rocm6.4"),
                             (None, None, "cpu")):  # fmt: skip
        text = f"cuda: Optional[str] = {cuda}\nhip: Optional[str] = {hip}\n"
        (tmp_path / "version.py").write_text(text)
        assert torch_build.installed_build.__wrapped__() == build


def test_an_order_to_end_is_heard_by_a_worker_that_is_not_yet_itself() -> None:
    """The supervisor ignores SIGTERM, and so does its child until it says otherwise."""
    code = """
import os, sys, time
from planner.machine import supervisor
become = supervisor._become_worker
supervisor._become_worker = lambda *given: (time.sleep(0.5), become(*given))
lifeline, order = os.pipe()
os.write(order, b"T")
supervisor.supervise([lambda: time.sleep(60)], lifeline, sys.stdout.fileno())
"""
    said = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, timeout=50)
    assert said.stdout.endswith(b"ended 15 0\n"), said


def test_supervisor_imports_little() -> None:
    """It is started for every probe: no more than a bare interpreter and ctypes."""
    code = "import sys; import planner.machine.supervisor; print(len(sys.modules))"
    answer = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, check=True)
    assert int(answer.stdout) < 80


@pytest.mark.parametrize(
    ("free_gib", "quota", "threads"),
    [(200, None, 32), (200, 3.5, 4), (200, 0.5, 1), (8, None, 8), (8, 4.0, 4), (0, None, 1)],
)
def test_compile_workers_have_room(
    monkeypatch: pytest.MonkeyPatch, free_gib: int, quota: float | None, threads: int
) -> None:
    """Half a GiB each, in half of what is free."""
    memory = MemoryInUse(256 * GIB, 256 * GIB - free_gib * GIB, free_gib * GIB)
    monkeypatch.delenv(THREADS, raising=False)
    monkeypatch.setattr(parent, "memory_in_use", lambda device: memory)
    monkeypatch.setattr(parent, "read_host", lambda: Host(64, 64, quota_cpus=quota))
    assert compile_threads() == threads
    assert probe_environment()[THREADS] == str(threads)
    monkeypatch.setenv(THREADS, "7")
    assert probe_environment()[THREADS] == "7", "a user's number is kept"


def test_threads_do_not_wait_on_processors_that_others_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(SPINS, raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert probe_environment()[SPINS] == str(SPIN_ROUNDS)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert SPINS not in probe_environment(), "a user's word is kept"
    monkeypatch.setenv(SPINS, "7")
    assert probe_environment()[SPINS] == "7"


TWO = Host(num_cpus=2, usable_cpus=2)


def watched(
    monkeypatch: pytest.MonkeyPatch, all_busy: float, own: float, host: Host = TWO,
    seconds: float = 10.0, wanted: float = math.inf,
) -> list[str]:  # fmt: skip
    """What is said of `seconds` in which so many seconds of processors went by."""
    readings: Iterator[tuple[float, float, float]] = iter(
        [
            (100.0, 50.0, 7.0),
            (100 + seconds, 50 + all_busy, 7 + own),
        ]
    )
    monkeypatch.setattr(evidence, "_read", lambda: next(readings))
    monkeypatch.setattr(evidence, "read_host", lambda: host)
    monkeypatch.setattr(evidence.os, "getloadavg", lambda: (20.0, 1.0, 1.0))
    return QuietWatch().flags(wanted)


def test_what_others_took_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 seconds of two processors: 2 were ours."""
    flags = watched(monkeypatch, all_busy=20, own=2)
    assert flags == ["other programs kept 1.8 of 2 processors busy meanwhile (load average 20)"]
    record = make_record(TrainSetting())
    assert not is_disturbed(record)
    assert not is_disturbed(record.model_copy(update={"flags": tuple(flags)}))


@pytest.mark.parametrize(
    ("all_busy", "own", "seconds", "host"),
    [
        (20, 19, 10, TWO),  # ours
        (11, 10, 10, TWO),  # a service
        (0, 9, 10, TWO),  # the kernel's counts are hidden
        (0.2, 0, 0.1, TWO),  # too short to tell
        (300, 20, 10, Host(num_cpus=64, usable_cpus=64, quota_cpus=4.0)),  # 36 are free
    ],
)
def test_a_quiet_machine_is_not_blamed(
    monkeypatch: pytest.MonkeyPatch, all_busy: float, own: float, seconds: float, host: Host
) -> None:
    assert watched(monkeypatch, all_busy, own, host, seconds) == []


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
    short = protocol.cut_message(text)
    assert len(short) == 1500
    assert short.startswith("torch.compile failed: InductorError: the cause\n…\n")
    assert short.endswith("graph\nat layer 7")
    assert protocol.cut_message("word\n" * 9) == "word\n" * 9
    assert len(protocol.cut_message("x" * 5000)) == 1500
    assert protocol.last_words("a\n\nb\n") == "a\nb"


def test_last_words_keep_what_nobody_caught() -> None:
    """As the C++ runtime and faulthandler print it, the backtrace of c10 between them."""
    uncaught = [
        "terminate called after throwing an instance of 'c10::OutOfMemoryError'",
        "  what():  CUDA out of memory. Tried to allocate 96.00 MiB.",
    ]
    backtrace = [f"frame #{i}: c10::Error::Error" for i in range(30)]
    lines = ["noise", *uncaught, *backtrace, "Fatal Python error: Aborted", "frame"]
    words = protocol.last_words("\n".join(lines))
    assert words.splitlines() == [*uncaught, "Fatal Python error: Aborted", "frame"]
    assert failures.is_allocation_failure(words)
    assert not failures.is_allocation_failure("ibv_reg_mr: Cannot allocate memory")
