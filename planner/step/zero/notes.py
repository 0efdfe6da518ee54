"""What an estimate under DeepSpeed rests on, in words."""

from __future__ import annotations

from planner.schema import TrainSetting
from planner.step.tensor import DTYPE_BYTES
from planner.step.zero.layout import Layout
from planner.units import format_bytes


def zero_notes(
    setting: TrainSetting, layout: Layout, dtype: str, num_buckets: int
) -> tuple[str, ...]:
    """`num_buckets` of the weights' `dtype` hold gradients on their way."""
    return (
        _what(setting, layout),
        *_precision(setting),
        *_bucket(setting, layout, dtype, num_buckets),
    )


def _what(setting: TrainSetting, layout: Layout) -> str:
    stage = setting.parallelism.removeprefix("zero")
    return (
        f"ZeRO-{stage} as DeepSpeed 0.19.8 runs it, in one group of weights: each of "
        f"{layout.world_size} devices updates {layout.share:,} of {layout.num_parameters:,} "
        "parameters; these are the figures of the one with the most gradients to keep"
    )


def _precision(setting: TrainSetting) -> tuple[str, ...]:
    if setting.precision == "pure-bf16":
        return (
            "pure-bf16 is DeepSpeed's bf16.enabled: weights, gradients and what crosses are bf16, "
            "and each device keeps fp32 copies of the weights that it updates",
        )
    if setting.autocast_dtype is not None:
        return (
            f"{setting.precision} is DeepSpeed's torch_autocast, which keeps weights and gradients "
            "in fp32; bf16.enabled or fp16.enabled would convert the model, which is another "
            "setting (pure-bf16 is the first)",
        )
    return ()


def _bucket(setting: TrainSetting, layout: Layout, dtype: str, num_buckets: int) -> tuple[str, ...]:
    """Where a bucket is larger than all that could be in it."""
    elements = setting.zero_reduce_bucket
    if elements <= layout.num_parameters:
        return ()
    size = format_bytes(elements * DTYPE_BYTES[dtype])
    count = "a bucket" if num_buckets == 1 else f"{num_buckets} buckets"
    default = "DeepSpeed's default of " if elements == 500_000_000 else ""
    why = ", one for each dtype in which gradients cross" if setting.autocast_dtype else ""
    each = "" if num_buckets == 1 else " each"
    fits = max(layout.numels)
    return (
        f"gradients wait in {count} of {size}{each}, whatever the model{why}: {default}"
        f"{elements:,} elements, and the model has {layout.num_parameters:,}. "
        f"zero_reduce_bucket={fits} (its largest weight) takes "
        f"{format_bytes(fits * DTYPE_BYTES[dtype])}{each}",
    )
