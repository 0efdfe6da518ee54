"""What torch.compile does in a probe without saying so."""

from __future__ import annotations

import logging

import torch


class CompileWatch:
    """Sees what the compiler does without saying: fall back, recompile, take from a cache."""

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
            found.append("compiled from a cache: compile_seconds is less than a first compile")
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
