"""How a failure is recognised and told: the one place that reads the text of errors."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Literal

# An allocation that failed outside of torch's caching allocator has only its text. Each stands here
# as its library writes it (read in torch 2.13's headers unless another place is named).
_ALLOCATION_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",  # c10/core/impl/alloc_cpu.cpp
    "std::bad_alloc",  # C++ operator new, as the runtime's terminate handler prints it
    # The caching allocator's own, where no exception of torch's is left to tell: a process that
    # ended by std::terminate, or an error that was raised anew from its text.
    "CUDA out of memory",  # c10/cuda/CUDACachingAllocator.cpp
    "HIP out of memory",  # the same file, translated for ROCm
    # The same file: out of memory, and NVML does not tell it what the message should say (on MIG,
    # Jetson and in some containers: pytorch #112377, #122068, #185240).
    "NVML_SUCCESS == r INTERNAL ASSERT FAILED",
    "CUDA error: out of memory",  # cudaErrorMemoryAllocation, raised by a library or a kernel
    "HIP error: out of memory",
    # Expandable segments (c10/cuda/driver_api.h) and Inductor's static launcher
    # (ATen/cuda/Exceptions.h).
    "CUDA driver error: out of memory",
    # Triton loading a kernel (triton-lang/triton @04e0bbd third_party/nvidia/backend/driver.c,
    # gpuAssert). Its "out of resource: shared memory" speaks of a kernel that no GPU of the kind
    # could hold.
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",  # cuBLAS handle or workspace
    "CUDNN_STATUS_ALLOC_FAILED",  # until cuDNN 8
    # Since cuDNN 9: cudnn_graph.h, statuses 4003 and 4004.
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)
# What libraries say when they find no memory, and also when something else is wrong: where the
# device's free memory can be read, it decides.
_AMBIGUOUS_TEXTS = (
    # ATen/cuda/CublasHandlePool.cpp: the handle that the backward's thread makes for itself, at the
    # fullest moment of a step; also after an illegal access (EleutherAI/lm-evaluation-harness #1689
    # has both).
    "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate",
    "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasLtCreate",
    # ATen/native/cudnn/Conv_v8.cpp; it begins with "GET was", "FIND was" or "Unable". No engine
    # found memory for its kernels or its workspace (pytorch #108645, #81620), or none supports this
    # GPU or this dtype on it.
    "nable to find an engine to execute this computation",
)
# oneDNN has one text for a primitive whose code or scratchpad found no memory; one that does not
# exist is "could not create a primitive descriptor …".
_ONEDNN_TEXT = re.compile(r"could not create a primitive\s*$", re.MULTILINE)
# Frames of a fatal signal that are worth keeping: the innermost ones come first.
_FATAL_LINES = 6
_LAST_LINES = 5
_MESSAGE_CHARACTERS = 1500
_FIRST_LINE_CHARACTERS = 500


def is_allocation_failure(text: str) -> bool:
    """Whether an error's text says that there was no memory, or may well mean it."""
    return (
        any(known in text for known in _ALLOCATION_TEXTS)
        or bool(_ONEDNN_TEXT.search(text))
        or is_ambiguous(text)
    )


def is_ambiguous(text: str) -> bool:
    """Whether an error's text may mean that there was no memory, and may mean something else."""
    return any(known in text for known in _AMBIGUOUS_TEXTS)


# What a rank says whose collective another rank has left: gloo's transport, which begins with its
# file ("[…/gloo/transport/tcp/pair.cc:553] Connection closed by peer", and as often "Read error …
# Connection reset by peer": torch 2.13), and NCCL through c10d's watchdog, which ends the process
# (ncclRemoteError is what NCCL calls a peer that is gone: nccl.h).
_LOST_PEER_TEXTS = (
    "gloo/transport/",
    "ncclRemoteError",
    "Watchdog caught collective operation timeout",
)


def is_lost_peer(text: str) -> bool:
    """Whether an error's text says that another rank is gone."""
    return any(known in text for known in _LOST_PEER_TEXTS)


def shorten(text: str) -> str:
    """A long text by its first line, which names the error, and its end, which says where."""
    if len(text) <= _MESSAGE_CHARACTERS:
        return text
    first = text.split("\n", 1)[0][:_FIRST_LINE_CHARACTERS]
    return f"{first}\n…\n{text[len(first) + 3 - _MESSAGE_CHARACTERS :]}"


def last_words(stderr: str) -> str:
    """The lines of a dead worker's standard error that say why, newest last, shortened.

    What the C++ runtime says of an exception that nobody caught stands before the "Fatal Python
    error", and its backtrace between the two.
    """
    lines = [line.rstrip() for line in stderr.splitlines() if line.strip()]
    fatal = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error")]
    first = fatal[-1] if fatal else max(0, len(lines) - _LAST_LINES)
    uncaught = [i for i, line in enumerate(lines[:first]) if line.startswith("terminate called")]
    kept = lines[uncaught[-1] : min(uncaught[-1] + 2, first)] if uncaught else []
    return shorten("\n".join([*kept, *lines[first : first + _FATAL_LINES]]))


def describe_exit(wait_status: int) -> str:
    """`exit status 3`, or `SIGSEGV (Segmentation fault)`."""
    if os.WIFSIGNALED(wait_status):
        number = os.WTERMSIG(wait_status)
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        return f"{name} ({signal.strsignal(number) or 'unknown'})"
    return f"exit status {os.waitstatus_to_exitcode(wait_status)}"


def judge_death(
    wait_status: int, words: str, kills_before: int | None, and_said: str = ""
) -> tuple[Literal["out_of_memory", "crashed"], str]:
    """What became of a worker that ended without an answer, and its message: from its status, the
    last words of its standard error, and how many processes the kernel had killed before it began.
    `and_said` goes behind the status."""
    said = describe_exit(wait_status)
    if is_allocation_failure(words):
        return "out_of_memory", f"{said}\n{words}"
    killed = os.WIFSIGNALED(wait_status) and os.WTERMSIG(wait_status) == signal.SIGKILL
    if killed and kernel_ran_out(kills_before):
        return "out_of_memory", "the kernel killed it: the machine is out of memory"
    return "crashed", f"{said}{and_said}\n{words}".strip()


def count_kernel_kills() -> int | None:
    """How many processes the kernel has killed for memory since boot; None where it is not told."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    counts = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
    return int(counts[0]) if counts else None


def kernel_ran_out(kills_before: int | None) -> bool:
    """Whether a SIGKILL that was not ours was the kernel's: its count of such kills has risen.

    Where the kernel keeps no count, memory is by far the likeliest reason.
    """
    kills = count_kernel_kills()
    return kills is None or kills_before is None or kills > kills_before


# A loader's batch for which /dev/shm has no room (torch 2.13: aten/src/ATen/MapAllocator.cpp).
# Where pages run out later, a worker ends by SIGBUS.
_SHARED_MEMORY_TEXTS = (
    "unable to allocate shared memory(shm)",
    "unable to write to file </torch_",
)


def is_shared_memory_failure(text: str) -> bool:
    """Whether a loader's error says that /dev/shm is full."""
    return any(known in text for known in _SHARED_MEMORY_TEXTS)


def is_out_of_files(text: str) -> bool:
    """Whether no more files could be opened (EMFILE, ENFILE as the C library says them)."""
    return "Too many open files" in text or "received 0 items of ancdata" in text
