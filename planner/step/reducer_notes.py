"""What a ledger with the buckets of `DistributedDataParallel` rests on, in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.core.schema import TrainSetting
from planner.core.units import format_bytes
from planner.ledger.ledger import GRADIENT_TO_HOST, Allocated, Ledger, Marked
from planner.step.reducer import (
    BUCKET_LABEL,
    COMPRESSED,
    COMPRESSED_LABEL,
    Reducer,
    steps_until_steady,
)


def reducer_notes(reducer: Reducer) -> tuple[str, ...]:
    """What a ledger with buckets rests on."""
    return tuple(_notes(reducer))


def bound(ledger: Ledger, setting: TrainSetting) -> Ledger:
    """`ledger`, which says how far what NCCL holds may differ from its events. With more than
    100 ms between two steps the first buckets, and compressed copies, are gone by the next. In
    shorter steps the buckets stay for all of a backward, and copies of further steps are there: of
    three, where each takes the host 33 ms."""
    if setting.parallelism != "ddp" and setting.offload_optimizer == "none":
        return ledger
    first = copies = step = 0
    for event in ledger.events:
        if type(event) is Marked:
            step += event.phase in ("build", "zero_grad")
        elif type(event) is Allocated and event.label == BUCKET_LABEL and step == 0:
            first += event.num_bytes
        elif type(event) is Allocated and event.label == COMPRESSED_LABEL and step == 1:
            copies += event.num_bytes
    leaving = 0
    if setting.offload_optimizer == "state-and-gradients":
        leaving = sum(o.num_bytes for _, o in ledger.operations() if o.name == GRADIENT_TO_HOST)
    replaced = first if steps_until_steady(setting) > 2 else 0
    return replace(
        ledger, doubtful_bytes=replaced + copies, late_bytes=replaced + 2 * copies + leaving
    )


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
            "static_graph: the first iteration reduces one bucket of all gradients after backward, "
            "and so does the second, as backward goes"
        )
    else:
        yield "the first iteration reduces one bucket of all gradients"
    if not reducer.is_dynamic:
        after = "third" if setting.ddp_static_graph else "second"
        yield (
            f"NCCL holds that bucket, beside the new ones, until backward of the {after} "
            "iteration; a pause of more than 100 ms before it frees the bucket"
        )
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
        f"{kind}_compress_hook: each bucket crosses as a copy in {kind}, which NCCL holds until "
        f"the next backward, {format_bytes(reducer.num_bytes // 2)} in all. In steps shorter than "
        "100 ms it holds as much of each step within that time"
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
