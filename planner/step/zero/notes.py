"""What an estimate under DeepSpeed rests on, in words."""

from __future__ import annotations

from planner.core.schema import TrainSetting
from planner.core.units import format_bytes
from planner.step.tensor import DTYPE_BYTES
from planner.step.zero.stage3 import Zero3Step
from planner.step.zero.step import ZeroStep

_DEFAULT_BUCKET = TrainSetting.model_fields["zero_reduce_bucket"].default


def zero_notes(zero: ZeroStep) -> tuple[str, ...]:
    """One line each."""
    gathered = _gathered(zero) if isinstance(zero, Zero3Step) else ()
    return (_what(zero), *_precision(zero.setting), *_buckets(zero), *gathered)


def _what(zero: ZeroStep) -> str:
    layout = zero.layout
    stage = zero.setting.parallelism.removeprefix("zero")
    which = (
        "all have as much"
        if isinstance(zero, Zero3Step)
        else "these are the figures of the one with the most gradients to keep"
    )
    return (
        f"ZeRO-{stage} as DeepSpeed 0.19.8 runs it, in one group of weights: each of "
        f"{layout.world_size} devices updates {zero.share:,} of {layout.num_parameters:,} "
        f"parameters; {which}"
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


def _buckets(zero: ZeroStep) -> tuple[str, ...]:
    """Where a bucket is larger than all that could be in it."""
    elements, layout = zero.setting.zero_reduce_bucket, zero.layout
    if elements <= layout.num_parameters:
        return ()
    sizes = zero.bucket_element_bytes
    default = "DeepSpeed's default of " if elements == _DEFAULT_BUCKET else ""
    count = "1 bucket" if len(sizes) == 1 else f"{len(sizes)} buckets"
    why = " (one for each dtype in which gradients cross)" if len(zero.buckets) > 1 else ""
    fits = max(layout.numels)
    return (
        f"gradients wait in {count}{why} of {default}{elements:,} elements, which take "
        f"{format_bytes(elements * sum(sizes))} whatever the model; this one has "
        f"{layout.num_parameters:,}. zero_reduce_bucket={fits}, its largest weight, takes "
        f"{format_bytes(fits * sum(sizes))}",
    )


def _gathered(zero: Zero3Step) -> tuple[str, ...]:
    """Why the figures of ZeRO-3 are a range."""
    size = DTYPE_BYTES[zero.dtype]
    least, most = zero.num_kept
    kept = format_bytes(most * size)
    if least != most:
        kept = f"{format_bytes(least * size)} to {kept}"
    whole = zero.layout.num_parameters - zero.num_cut
    found = [
        f"weights that are gathered: {kept} stay from forward to backward (zero_max_reuse, and "
        f"what zero_prefetch_bucket meets), and up to {format_bytes(zero.num_in_flight * size)} "
        "are in flight, which depends on when the device gets to a layer: the range begins where "
        f"they are not, nor casts of weights under autocast; {format_bytes(whole * size)} stay "
        "whole always (zero_persistence)",
        "what is in flight is given back when the other stream is done (record_stream): the range "
        "ends where that is as late as can be",
    ]
    if zero.num_cut and least == zero.num_cut:
        found.append(
            "zero_max_reuse is at least twice the model, so that ZeRO-3 keeps all weights from "
            "forward to backward, as ZeRO-2 does; zero_max_reuse=0 with zero_prefetch_bucket=0 "
            "gathers one layer at a time, twice a step"
        )
    return tuple(found)
