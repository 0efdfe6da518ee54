"""DeepSpeed's engine, which accelerate, Lightning and transformers run too: what they say of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.core.schema import TrainSetting
from planner.core.schema.distribution import Parallelism
from planner.trainers.plan import Parallel
from planner.trainers.source import mapping
from planner.training.parallel.deepspeed_configuration import STAGES, engine_values


def reduces_each(setting: TrainSetting) -> dict[str, str]:
    """Stages 2 and 3 reduce gradients in every micro-batch (runtime/zero/stage_1_and_2.py,
    runtime/zero/stage3.py): their engine refuses `no_sync`."""
    return {"gradient_sync": "last" if setting.parallelism == "zero1" else "every"}


ZERO_PARALLEL: dict[Parallelism, Parallel] = {stage: Parallel(own=reduces_each) for stage in STAGES}


def engine_source(setting: TrainSetting, batch: Mapping[str, Any] | None = None) -> str:
    """`DEEPSPEED = {…}`, with the keys of `batch`; "" where it is not DeepSpeed that trains."""
    if setting.parallelism not in STAGES:
        return ""
    return mapping("DEEPSPEED", {**(batch or {}), **engine_values(setting)})


def zero_notes(setting: TrainSetting) -> tuple[str, ...]:
    """What is to be known of its buckets."""
    if setting.parallelism not in STAGES:
        return ()
    own = "500,000,000 elements: 1 GB in 16 bits, 2 GB in fp32, whatever the model"
    return (f"Buckets hold 25 MiB of fp32, as DDP's. DeepSpeed's own are of {own}.",)


def on_gpus(parallel: Mapping[Parallelism, Parallel]) -> dict[Parallelism, Parallel]:
    """The same, of a trainer that runs them on GPUs only."""
    return {name: how._replace(needs_gpu=True) for name, how in parallel.items()}
