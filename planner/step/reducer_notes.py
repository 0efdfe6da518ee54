"""What a ledger with the buckets of `DistributedDataParallel` rests on, in words."""

from __future__ import annotations

from collections.abc import Iterator

from planner.schema import TrainSetting
from planner.step.reducer import COMPRESSED, Reducer
from planner.units import format_bytes


def reducer_notes(reducer: Reducer) -> tuple[str, ...]:
    """What a ledger with buckets rests on."""
    return tuple(_notes(reducer))


def _notes(reducer: Reducer) -> Iterator[str]:
    setting, count = reducer.setting, len(reducer.buckets)
    buckets = f"{count} gradient buckets" if count > 1 else "one gradient bucket"
    held = "beside the gradients and counted with them"
    if setting.ddp_bucket_view:
        held = "of which the gradients are views (gradient_as_bucket_view)"
    yield (
        f"DistributedDataParallel: {buckets} of {format_bytes(reducer.num_bytes)} in all, {held}, "
        "whatever the number of GPUs"
    )
    if reducer.is_dynamic:
        yield (
            "find_unused_parameters: buckets in the order of registration, never rebuilt, and a "
            "copy of what the model returns"
        )
    elif setting.ddp_static_graph:
        yield (
            "static_graph: the first iteration reduces one bucket after backward. torch keeps it "
            "for the second iteration too, which is left out"
        )
    else:
        yield "the first iteration reduces one bucket of all gradients"
    if setting.ddp_find_unused and setting.ddp_static_graph:
        yield (
            "static_graph finds unused parameters by itself: torch warns of find_unused_parameters"
        )
    if setting.accumulate > 1:
        yield _note_of_sync(setting)
    yield from _notes_of_compression(reducer)


def _note_of_sync(setting: TrainSetting) -> str:
    if setting.gradient_sync == "every":
        return (
            "gradients are summed over devices in every micro-batch (gradient_sync=every), as "
            "trainers without no_sync do"
        )
    beside = ", and gradients are no views of buckets until then" if setting.ddp_bucket_view else ""
    return f"gradients are summed over devices in the last micro-batch only (no_sync){beside}"


def _notes_of_compression(reducer: Reducer) -> Iterator[str]:
    kind = reducer.setting.ddp_compression
    if kind == "none":
        return
    if all(bucket.dtype == COMPRESSED[kind] for bucket in reducer.buckets):
        yield f"{kind}_compress_hook changes nothing: gradients are {kind} already"
        return
    yield (
        f"{kind}_compress_hook: each bucket crosses as a copy in {kind}, which is held until "
        f"backward ends, {format_bytes(reducer.num_bytes // 2)} in all. NCCL may let go of copies "
        "earlier"
    )
    if kind == "fp16" and reducer.setting.precision == "fp16":
        yield (
            "fp16_compress_hook sends gradients as GradScaler scaled them: beyond 65,504 they "
            "become infinite, the step is skipped and the scale falls. bf16 keeps the range"
        )
    elif kind == "fp16":
        yield (
            "fp16_compress_hook without GradScaler: gradients beyond 65,504 become infinite and "
            "nothing skips the step, and those below 6e-8 become 0. bf16 keeps the range"
        )
