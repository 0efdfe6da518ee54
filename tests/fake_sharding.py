"""One rank of FSDP2 as torch itself runs it, on fake tensors: what shapes are laid beside."""

from __future__ import annotations

from functools import partial

from planner.core.schema import ResolvedSetting, SwinConfig
from planner.ledger.ledger import Event
from planner.libraries.registry import find_library
from planner.trace.faults import BrokenTraceError
from planner.trace.run import trace_training


def trace_sharded(config: SwinConfig, setting: ResolvedSetting, rank: int = 0) -> list[Event]:
    """The events of two optimizer steps of one rank, after those of building it."""
    build = partial(find_library(config.library).build, config, setting)
    try:
        return list(trace_training(build, config, setting, rank=rank).events)
    except BrokenTraceError as broken:
        raise broken.__cause__ or broken from None
