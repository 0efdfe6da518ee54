"""What torch.compile does in a probe without saying so, and the processes it compiles in."""

from __future__ import annotations

import logging
import sys
import threading

import torch

from search.probe.evidence import FROM_CACHE

# Workers with nothing left to compile end at once; one that hangs is left to end with the probe.
_WORKERS_SECONDS = 10.0


def end_workers(limit_seconds: float = _WORKERS_SECONDS) -> list[str]:
    """End the processes that Inductor compiles in, which would be in the way of timed steps.

    A flag where they are still there after `limit_seconds`. Should anything be compiled later,
    Inductor starts them anew (torch 2.9 to 2.13: torch/_inductor/async_compile.py).
    """
    module = sys.modules.get("torch._inductor.async_compile")
    if module is None:
        return []
    ending = threading.Thread(target=module.shutdown_compile_workers, daemon=True)
    ending.start()
    ending.join(limit_seconds)
    return ["compile workers were alive while steps were timed"] if ending.is_alive() else []


class CompileWatch:
    """Sees what the compiler does without saying: fall back, recompile, take from a cache, leave
    out CUDA graphs."""

    def __init__(self) -> None:
        self._limits = _RecompileLimitHandler()
        logging.getLogger("torch._dynamo.convert_frame").addHandler(self._limits)
        self._graphs_before = 0

    def begin_timing(self) -> None:
        self._graphs_before = self._count("stats", "unique_graphs")

    def flags(self) -> list[str]:
        found = []
        if self._limits.hits:
            found.append(f"fell back to eager: {self._limits.hits[0]}")
        if self._count("stats", "unique_graphs") > self._graphs_before:
            found.append("recompiled while steps were timed")
        if self._count("inductor", "fxgraph_cache_hit"):
            found.append(FROM_CACHE)
        skips = self._count("inductor", "cudagraph_skips")
        if skips:
            found.append(f"CUDA graphs that the compiler left out: {skips}")
        breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
        if breaks:
            found.append(f"{breaks} graph breaks")
        return found

    def _count(self, group: str, name: str) -> int:
        return int(torch._dynamo.utils.counters[group][name])


class _RecompileLimitHandler(logging.Handler):
    """Dynamo tells in a warning alone that it will run a function eagerly from now on."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.hits: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.msg, str) and record.msg.startswith("torch._dynamo hit config."):
            self.hits.append(record.getMessage().split("\n")[0])
