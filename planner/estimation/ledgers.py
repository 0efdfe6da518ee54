"""The ledger of any model and setting at any batch: from the step on shapes, or from a trace.

A trace is made once and kept (`planner.ledger.cache`): recorded at two batches, checked at a third.
Imports no torch: where nothing else has, traces are made in a process of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache

from planner.core.errors import PlannerError, printable
from planner.core.schema import FactoryModel, Model, ResolvedSetting, SwinConfig, TrainSetting
from planner.core.schema.distribution import DEEPSPEED, SHARDED
from planner.core.schema.setting import GRAPH_MODES
from planner.core.terminal import shows_seconds
from planner.core.torch_version import torch_version
from planner.ledger.affine import AffineLedger, Recorder
from planner.ledger.ledger import Ledger
from planner.libraries.factory import check_factory
from planner.libraries.registry import find_library
from planner.memory.compiled import has_known_graphs, in_graph_pool, is_compiled
from planner.step.sharding import follows_fsdp
from planner.step.training import record_training
from planner.step.zero import insert_zero_events, on_one_device, unknown
from planner.trace.here import may_trace_here
from planner.trace.kept_step import MAX_HELD, alike, traced_step
from planner.trace.process import trace_elsewhere


def step_ledger(model: Model, setting: ResolvedSetting, traced: bool = False) -> Ledger:
    """The events of building the model and of its first two optimizer steps.

    Of a `SwinConfig` on shapes, unless `traced`; of any other model from a trace. A compiled step
    comes from a trace or, on shapes, from the trace that is kept; where there is none, it is the
    eager step, which `planner.memory.compiled` says how far to trust. At most
    `RECORDED_MICRO_BATCHES` micro-batches are recorded, since the third repeats the second.
    Under DeepSpeed it is the step on one device, with what ZeRO does inserted.
    Raises PlannerError for what cannot be recorded.
    """
    if setting.parallelism in DEEPSPEED:
        error = unknown(setting)
        if error is not None:
            raise error
        return insert_zero_events(
            step_ledger(model, on_one_device(setting), traced), setting
        ).ledger
    if is_on_shapes(model, setting, traced):
        assert isinstance(model, SwinConfig)
        ledger = _kept_compiled(model, setting) or _eager_on_shapes(model, setting)
    else:
        step = traced_step(model, setting)
        if step.answer(setting.batch_size) is None:
            record_ledgers([(model, setting)])
        ledger = step.ledger(setting.batch_size)
    is_graphed = setting.compile in GRAPH_MODES and is_compiled(ledger)
    return in_graph_pool(ledger) if is_graphed else ledger


def _kept_compiled(config: SwinConfig, setting: ResolvedSetting) -> Ledger | None:
    if not has_known_graphs(config, setting):
        return None
    step, batch_size = traced_step(config, setting), setting.batch_size
    is_known = step.answer(batch_size) is not None and step.error(batch_size) is None
    return step.ledger(batch_size) if is_known else None


def _eager_on_shapes(config: SwinConfig, setting: ResolvedSetting) -> Ledger:
    ledger = _recorder(config, setting).ledger(setting.batch_size)
    drift = find_library(config.library).drift(config)
    return replace(ledger, notes=(*ledger.notes, *drift)) if drift else ledger


def _recorder(config: SwinConfig, setting: ResolvedSetting) -> Recorder:
    uncompiled = ResolvedSetting(alike(config, setting).uncompiled())
    return _on_shapes(config, uncompiled, torch_version())


def is_on_shapes(model: Model, setting: TrainSetting, traced: bool = False) -> bool:
    """Whether the ledger comes from the step on shapes: at once, and without torch. Linear layers
    that multiply in 8 bits are torchao's, and traced; so is what of FSDP2 no shapes follow."""
    if not isinstance(model, SwinConfig) or traced or setting.precision == "fp8":
        return False
    return setting.parallelism not in SHARDED or _is_sharded_on_shapes(model, setting)


def _is_sharded_on_shapes(config: SwinConfig, setting: TrainSetting) -> bool:
    """A block that is checkpointed reentrantly gathers its weights in backward only."""
    reentrant = find_library(config.library).reentrant
    return setting.checkpointing not in reentrant and follows_fsdp(setting)


def affine_step(model: Model, setting: ResolvedSetting) -> AffineLedger | None:
    """What `step_ledger` reads its answers off: the eager step on shapes, recorded once, or the
    trace that is kept. None where there is none, or no line goes through it. Never traces."""
    if setting.parallelism in DEEPSPEED:
        if unknown(setting) is not None:
            return None
        one = affine_step(model, on_one_device(setting))
        return None if one is None else insert_zero_events(one.at, setting).line(one)
    setting = setting.model_copy(update={"batch_size": 2})
    if is_on_shapes(model, setting):
        assert isinstance(model, SwinConfig)
        if _kept_compiled(model, setting) is None:
            return _recorder(model, setting).line()
    found = traced_step(model, setting).answer(2)
    return found if isinstance(found, AffineLedger) else None


def record_ledgers(
    requests: Sequence[tuple[Model, ResolvedSetting]],
    say: Callable[[str], None] | None = None,
    limit_seconds: float | None = None,
) -> list[PlannerError | None]:
    """Traces what of `requests` is not kept; for each of them the error that it ended with.

    Other processes make the traces, and end after `limit_seconds`; without a limit they are made
    here where `may_trace_here`. `say` is told what is traced, and how many traces are done
    (standard error, where it is not given).
    Raises UsageError for a factory whose module is nowhere.
    """
    wanted = [(traced_step(*request), request[1].batch_size) for request in requests]
    missing = [(step, batch) for step, batch in wanted if step.answer(batch) is None]
    if missing:
        here = limit_seconds is None and all(may_trace_here(step.model) for step, _ in missing)
        for step, _ in missing:
            if not here and isinstance(step.model, FactoryModel):
                check_factory(step.model.factory)
        compiles = any(step.setting.compile != "off" for step, _ in missing)
        wait = "one to three minutes" if compiles else "some seconds"
        wait += f" for each of {len(missing)} settings" if len(missing) > 1 else ""
        tell = say or _say
        tell(f"Tracing {missing[0][0].model.title}, once: {wait} ('planner cache' lists traces).")

        def count(num_done: int) -> None:
            if num_done < len(missing):
                tell(f"{num_done} of {len(missing)} traces done.")

        with nullcontext() if say else shows_seconds():
            if not here:
                late = trace_elsewhere(missing, count, limit_seconds)
                if 0 < late < len(missing):
                    tell(
                        f"{late} of {len(missing)} traces were not done after "
                        f"{limit_seconds:.0f} s, and were ended: less is known beforehand."
                    )
            else:
                with sys.modules["torch"].random.fork_rng(devices=[]):
                    for step, batch in missing:
                        step.record(batch)
    return [step.error(batch) for step, batch in wanted]


@lru_cache(MAX_HELD)
def _on_shapes(config: SwinConfig, alike: ResolvedSetting, torch: tuple[int, int]) -> Recorder:
    """The first batch is recorded as it is, all others are read off one recording of HUGE. What is
    recorded differs with the version of `torch`."""
    build = find_library(config.library).on_shapes(config, alike)

    def record(batch_size: int) -> Ledger:
        at_batch = alike.model_copy(update={"batch_size": batch_size})
        return record_training(build, config, at_batch)

    return Recorder(record)


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
