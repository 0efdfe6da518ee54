"""DeepSpeed's engine, which accelerate, Lightning and transformers run too: the part of its
configuration that none of them fills in.

Keys as in DeepSpeed 0.19, runtime/zero/config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.schema import TrainSetting
from planner.schema.distribution import Parallelism
from planner.trainers.plan import Parallel
from planner.trainers.source import mapping

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}
_SIZES = {
    # A field of a Distribution, and what runtime/zero/config.py calls it: of every stage, and of 3.
    "zero_reduce_bucket": "reduce_bucket_size", "zero_allgather_bucket": "allgather_bucket_size",
    "zero_prefetch_bucket": "stage3_prefetch_bucket_size",
    "zero_persistence": "stage3_param_persistence_threshold",
    "zero_max_live": "stage3_max_live_parameters", "zero_max_reuse": "stage3_max_reuse_distance",
}  # fmt: skip


def reduces_each(setting: TrainSetting) -> dict[str, str]:
    """Stages 2 and 3 reduce gradients in every micro-batch (runtime/zero/stage_1_and_2.py,
    runtime/zero/stage3.py): their engine refuses `no_sync`."""
    return {"gradient_sync": "last" if setting.parallelism == "zero1" else "every"}


ZERO_OPTIONS = frozenset(("zero_reduce_bucket", "zero_overlap"))
ZERO_PARALLEL: dict[Parallelism, Parallel] = {
    "zero1": Parallel(ZERO_OPTIONS | {"zero_allgather_bucket"}, reduces_each),
    "zero2": Parallel(ZERO_OPTIONS | {"zero_allgather_bucket"}, reduces_each),
    "zero3": Parallel(
        ZERO_OPTIONS
        | {"zero_prefetch_bucket", "zero_persistence", "zero_max_live", "zero_max_reuse"},
        reduces_each,
    ),
}  # fmt: skip


def engine_values(setting: TrainSetting) -> dict[str, Any]:
    """What of a configuration no trainer above DeepSpeed fills in: the stage and its buckets, and
    autocast, which those trainers would turn into a model of 16 bits."""
    stage = STAGES.get(setting.parallelism, 0)
    zero: dict[str, Any] = {"stage": stage}
    if stage:
        zero |= {
            name: getattr(setting, field)
            for field, name in _SIZES.items()
            if field in ZERO_PARALLEL[setting.parallelism].writes
        }
        zero["overlap_comm"] = setting.zero_overlap
        if setting.zero_overlap is None:
            zero["overlap_comm"] = stage == 3  # DeepSpeed's own
    values: dict[str, Any] = {"zero_optimization": zero}
    if stage:
        values["zero_allow_untested_optimizer"] = True  # ours is torch's
    if setting.autocast_dtype is not None:
        values["torch_autocast"] = {"enabled": True, "dtype": setting.autocast_dtype}
    return values


def engine_source(setting: TrainSetting, batch: Mapping[str, Any] | None = None) -> str:
    """`DEEPSPEED = {…}`, with the keys of `batch`; "" where it is not DeepSpeed that trains."""
    if setting.parallelism not in STAGES:
        return ""
    return mapping("DEEPSPEED", {**(batch or {}), **engine_values(setting)})


def zero_notes(setting: TrainSetting) -> tuple[str, ...]:
    """What is to be known of a stage and of its buckets."""
    stage = STAGES.get(setting.parallelism)
    if stage is None:
        return ()
    sizes = "one bucket of gradients holds the larger of 25 MiB in fp32 and the largest weight"
    if stage == 3:
        sizes += "; a block of three such weights is fetched ahead, and two stay gathered"
    own = "500,000,000 elements: 1 GB in 16 bits, 2 GB in fp32, whatever the model"
    return (f"Where buckets were not set, {sizes}. DeepSpeed's own are of {own}.",)


def on_gpus(parallel: Mapping[Parallelism, Parallel]) -> dict[Parallelism, Parallel]:
    """The same, of a trainer that runs them on GPUs only."""
    return {name: how._replace(needs_gpu=True) for name, how in parallel.items()}
