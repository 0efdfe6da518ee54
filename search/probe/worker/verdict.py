"""What a probe's end says about its setting: how an error is classified, which precisions a device
has, and what the compiler did."""

import logging
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from planner.core.errors import PlannerError
from planner.core.failures import is_allocation_failure, is_ambiguous, is_lost_peer
from planner.core.schema import ProbeStatus
from planner.core.units import GIB, MIB, format_bytes
from planner.machine.hardware.gpu import CPU_PRECISIONS, lacking_error, precisions_of
from search.probe.evidence import FROM_CACHE
from search.probe.protocol import ProbeRequest

# A device with less free memory than this, or than a hundredth of its total, has none left. A
# judgement: the caching allocator of a step that just fits leaves less than one of its 20 MiB
# segments.
_SHORT_BYTES = 256 * MIB
_SHORT_PARTS = 100
# No library loads more than this when it is first used: cuDNN's kernels took 500 MB until its
# version 8.5 (pytorch #81620).
_LIBRARY_BYTES = GIB


class NonFiniteError(Exception):
    """The loss, or a weight after the steps, is not a number or infinite."""


@dataclass(frozen=True)
class MemoryReading:
    """A device's memory right after a failure.

    `num_failed` counts the allocations that failed in this process, including those that succeeded
    after cached memory was released.
    """

    free_bytes: int
    total_bytes: int
    num_failed: int = 0

    @property
    def is_short(self) -> bool:
        """Whether a lack of memory is the likely cause of an error that names none."""
        short_bytes = max(_SHORT_BYTES, self.total_bytes // _SHORT_PARTS)
        return self.num_failed > 0 or self.free_bytes < short_bytes

    def __str__(self) -> str:
        free = f"{format_bytes(self.free_bytes)} of {format_bytes(self.total_bytes)} free"
        return f"{free}, {self.num_failed} allocations failed" if self.num_failed else free


def read_device_memory(device: str) -> MemoryReading | None:
    """The reading of "cuda:N". None on the CPU, before CUDA is initialised, and after an error that
    made the context unusable: every call then raises that error again."""
    if device == "cpu" or not torch.cuda.is_initialized():
        return None
    try:
        stats = torch.cuda.memory_stats(device)
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:
        return None
    return MemoryReading(free, total, stats.get("num_ooms", 0) + stats.get("num_alloc_retries", 0))


def classify(error: BaseException, memory: MemoryReading | None = None) -> tuple[ProbeStatus, str]:
    """The status and the message of a failure. `memory` was read right after it.

    A failure is out-of-memory if any error in the chain is one: compilers wrap it. So is an error
    that does not name memory (a library's, or the compiler's) if the device then has none left. A
    model that a compiler cannot compile is an unsupported setting, not a crash: the same setting
    without compilation may well run.
    """
    chain = list(error_chain(error))
    for link in chain:
        if isinstance(link, NonFiniteError):
            return "non_finite", str(link)
        if _is_out_of_memory(link, memory):
            return "out_of_memory", _first_line(link) or type(link).__name__
    for link in chain:
        if isinstance(link, PlannerError):
            return "unsupported", str(link)
    if memory is not None and memory.is_short and isinstance(error, RuntimeError):
        text = f"{type(error).__name__}: {_first_line(error)}"
        return "out_of_memory", f"the device was short of memory ({memory}) when it failed: {text}"
    for link in chain:
        if is_compile_failure(link):
            return "unsupported", f"torch.compile failed: {type(link).__name__}: {link}".strip()
    frames = traceback.extract_tb(error.__traceback__)
    in_files = [frame for frame in frames if not frame.filename.startswith("<")]
    location = f" ({in_files[-1].filename}:{in_files[-1].lineno})" if in_files else ""
    return "crashed", f"{type(error).__name__}: {error}{location}"


def _is_out_of_memory(error: BaseException, memory: MemoryReading | None) -> bool:
    """Whether one error of a chain is an out-of-memory, by its type or by its text. An ambiguous
    text counts only where a library that loads all of its kernels may have had no room."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError) or not is_allocation_failure(str(error)):
        return False
    if memory is None or memory.num_failed or memory.free_bytes < _LIBRARY_BYTES:
        return True
    return not is_ambiguous(str(error))


def error_chain(error: BaseException) -> Iterator[BaseException]:
    """The error, its cause, the cause of that, and so on."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def is_compile_failure(error: BaseException) -> bool:
    """Whether the compiler raised it: Dynamo, AOTAutograd's backends or Inductor."""
    module = type(error).__module__
    return module.startswith(("torch._dynamo.", "torch._inductor.", "torch._functorch."))


def has_lost_others(error: BaseException) -> bool:
    """Whether a rank failed because another rank is gone, or does not answer."""
    return any(
        isinstance(link, torch.distributed.DistError) or is_lost_peer(str(link))
        for link in error_chain(error)
        if isinstance(link, RuntimeError)
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


def check_matrix_units(request: ProbeRequest) -> None:
    """Raises UnsupportedError for tf32 and fp8 on a device without matrix units for them: there
    torch computes tf32 in fp32, and fp8 not at all."""
    precision = request.setting.precision
    if precision not in ("tf32", "fp8"):
        return
    available: tuple[str, ...] = CPU_PRECISIONS
    if request.device != "cpu":  # ROCm counts capabilities in another way
        vendor = "AMD" if torch.version.cuda is None else "NVIDIA"
        available = precisions_of(vendor, torch.cuda.get_device_capability(request.device))
    if precision not in available:
        raise lacking_error(request.device, precision, available)


# Workers with nothing left to compile end at once; one that hangs ends with the probe.
_WORKERS_SECONDS = 10.0


def end_workers(limit_seconds: float = _WORKERS_SECONDS) -> list[str]:
    """Ends the processes that Inductor compiles in, which would disturb timed steps. Returns a flag
    if they are still alive after `limit_seconds`.

    If anything is compiled later, Inductor starts them anew (torch 2.9 to 2.13:
    torch/_inductor/async_compile.py).
    """
    module = sys.modules.get("torch._inductor.async_compile")
    if module is None:
        return []
    shutdown = threading.Thread(target=module.shutdown_compile_workers, daemon=True)
    shutdown.start()
    shutdown.join(limit_seconds)
    return ["compile workers were alive while steps were timed"] if shutdown.is_alive() else []


class CompileWatch:
    """Notices what the compiler does without an error: it falls back to eager, recompiles, takes
    code from a cache, breaks graphs or leaves out CUDA graphs."""

    def __init__(self) -> None:
        self._limits = _RecompileLimitHandler()
        logging.getLogger("torch._dynamo.convert_frame").addHandler(self._limits)
        self._graphs_before = 0

    def begin_timing(self) -> None:
        self._graphs_before = self._read_counter("stats", "unique_graphs")

    def flags(self) -> list[str]:
        flags = []
        if self._limits.hits:
            flags.append(f"fell back to eager: {self._limits.hits[0]}")
        if self._read_counter("stats", "unique_graphs") > self._graphs_before:
            flags.append("recompiled while steps were timed")
        if self._read_counter("inductor", "fxgraph_cache_hit"):
            flags.append(FROM_CACHE)
        skips = self._read_counter("inductor", "cudagraph_skips")
        if skips:
            flags.append(f"CUDA graphs that the compiler left out: {skips}")
        breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
        if breaks:
            flags.append(f"{breaks} graph breaks")
        return flags

    def _read_counter(self, group: str, name: str) -> int:
        return int(torch._dynamo.utils.counters[group][name])


class _RecompileLimitHandler(logging.Handler):
    """Keeps the warnings by which Dynamo tells that it runs a function eagerly from now on; it
    tells that nowhere else."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.hits: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.msg, str) and record.msg.startswith("torch._dynamo hit config."):
            self.hits.append(record.getMessage().split("\n")[0])
