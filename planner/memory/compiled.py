"""What `torch.compile` means for an estimate: whose ledger it rests on, and how far to trust it.

The ledger of a compiled step is recorded (`planner.recording`). Without it the eager step's
bounds the compiled one. Imports no torch.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count

from planner.core.schema import TrainSetting
from planner.core.schema.setting import SHARDED
from planner.ledger.ledger import Allocated, Category, Event, Freed, Ledger, Marked, Tagged
from planner.memory.caching_allocator import rounded

# Kernels are named as Inductor names them: generated, fused ones, and those of libraries.
FUSED_PREFIX = "triton_"
EXTERN_PREFIX = "extern_kernels."
POOL_LABEL = "CUDA graph pool"


@dataclass(frozen=True)
class Basis:
    """What the figures of a compiled step rest on: `low` and `high` are the ends of the range,
    relative to reserved bytes; `notes` say it, and `left_out` what is not known."""

    low: float
    high: float
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


# Saved tensors are those of torch's own partition, to the byte, and the peak of allocated bytes lay
# 0.3 to 0.4% under that of an H200; reserved bytes lay 0.2% under to 7.3% over, as Inductor orders
# kernels otherwise and so leaves other holes (torch 2.11, eleven measurements of native Swin-T,
# bf16, batches of 64 to 768, 2026-11-26, tests/truth/h200). Two-block Swins of other libraries lay
# between 0.95 and 1.04 of what Inductor's scheduler estimates where it lowers the same graphs for a
# CPU (torch 2.13, 2026-11-22). The range is some two to three times that (inferred).
RECORDED = Basis(
    0.85,
    1.2,
    (
        "each compiled graph's saved tensors by torch's own min-cut partitioner, its kernels fused "
        "in the graph's order; loss and optimizer eager",
    ),
    (
        "what Inductor does to its kernels' order, padded strides and scratch of tuned kernels",
        "compilation itself, which takes memory of the host, and the first steps' warm-up",
    ),
)
# The eager step stands for the compiled one. The range holds the published spread (inferred).
BOUNDED = Basis(
    0.55,
    1.25,
    (
        "the eager step in place of the compiled one, with a wide range, and its time with chains "
        "of pointwise kernels taken as fused. --record compiles the model as far as torch's "
        "partition, which takes about a minute and is kept, and narrows the range",
    ),
    ("what compilation changes",),
)
UNTUNED = (
    "kernels of max-autotune no faster than untuned ones: which are depends on the device, and no "
    "estimate knows"
)
RECOMPUTED_AT_ONCE = "that torch may recompute all checkpointed blocks at once"
BROKEN = Basis(
    BOUNDED.low,
    BOUNDED.high,
    (),
    (
        "what compilation changes: several graphs of what is compiled are not recorded, so the "
        "step is estimated as eager and the range widened",
    ),
)


def basis_of(setting: TrainSetting, ledger: Ledger) -> Basis:
    """What `ledger` says of a compiled step."""
    if is_compiled(ledger):
        return RECORDED
    return BOUNDED if has_known_graphs(setting) else BROKEN


def untuned(setting: TrainSetting) -> tuple[str, ...]:
    """What is assumed of kernels that torch would choose by timing them."""
    return (UNTUNED,) if setting.compile.startswith("max-autotune") else ()


def left_out_of(basis: Basis, setting: TrainSetting) -> tuple[str, ...]:
    """What is not known of the step that `setting` compiles."""
    if basis is BOUNDED and may_recompute_at_once(setting):
        return (*basis.left_out, RECOMPUTED_AT_ONCE)
    return basis.left_out


def may_recompute_at_once(setting: TrainSetting) -> bool:
    """Whether one compiled graph holds all that is checkpointed. torch's partitioner need not save
    what enters a block (of timm's `checkpoint_seq` it saves none, torch 2.13), and then recomputes
    every block before the backward of the last. Blocks that are compiled by themselves are
    recomputed one at a time."""
    return setting.checkpointing != "none" and setting.compile_scope == "model"


def has_known_graphs(setting: TrainSetting) -> bool:
    """Whether what `setting` compiles is recorded: the model as one graph, or each block. Under
    DDP torch itself breaks any graph, at the ends of its buckets
    (torch/_dynamo/backends/distributed.py); FSDP2's hooks around each unit are kept from Dynamo
    (`_dynamo_disable`), and weights that come and go are in no graph that is recorded."""
    return setting.compile != "off" and setting.parallelism not in ("ddp", *SHARDED)


def is_compiled(ledger: Ledger) -> bool:
    """Whether these are the kernels of a compiled graph, not the operations of eager code."""
    return any(map(is_kernel, ledger.operation_names))


def is_kernel(name: str) -> bool:
    """Whether this is a kernel of a compiled graph, by its name."""
    return name.startswith((FUSED_PREFIX, EXTERN_PREFIX))


def in_graph_pool(ledger: Ledger) -> Ledger:
    """The ledger of a compiled step with CUDA graphs: all memory of its forward and backward is a
    pool of its own at its high-water mark, taken whole at the first call and never given back.

    It is three storages: what forward saves, the gradients, which are made while saved tensors die,
    and the rest. Images are copied into holes of the pool: it grows as the first step warms up, and
    not as the second is recorded (torch 2.11 and 2.14 on an emulated H200).
    """
    own = {
        event.storage: rounded(event.num_bytes)
        for event in ledger.events
        if isinstance(event, Allocated) and is_kernel(event.label)
    }
    size, saved, gradients = _course(ledger.events, own)
    gradients = min(size, gradients)
    saved = min(size - gradients, saved)
    pool = ((saved, "saved"), (gradients, "gradients"), (size - gradients - saved, "rest"))
    numbers = (event.storage for event in ledger.events if isinstance(event, Allocated))
    events = tuple(_pooled(ledger.events, own, pool, max(numbers) + 1))
    note = "CUDA graphs hold a pool of their own at its high-water mark, through the optimizer too"
    return replace(
        ledger,
        events=events,
        notes=(*ledger.notes, note),
        pooled_saved_bytes=saved,
        pool_requests=tuple(_requests(ledger.events, own)),
    )


def _course(events: Iterable[Event], own: dict[int, int]) -> tuple[int, int, int]:
    """Of the storages `own`: most bytes alive at once, those at the end of the last forward, and at
    the end of the last backward."""
    live = peak = saved = gradients = 0
    for event in events:
        if isinstance(event, Allocated):
            live += own.get(event.storage, 0)
            peak = max(peak, live)
        elif isinstance(event, Freed):
            live -= own.get(event.storage, 0)
        elif isinstance(event, Marked) and event.phase == "forward":
            saved = live
        elif isinstance(event, Marked) and event.phase == "backward":
            gradients = live
    return peak, saved, gradients


def _requests(events: Iterable[Event], own: dict[int, int]) -> Iterator[int]:
    """What the storages `own` ask of their pool, as `planner.memory.replay` takes it."""
    entries = count()
    held: dict[int, int] = {}
    for event in events:
        if isinstance(event, Allocated | Freed) and event.storage in own:
            entry = next(entries)
            if isinstance(event, Allocated):
                held[event.storage] = entry
                yield event.num_bytes
            else:
                yield ~held[event.storage]


def _pooled(
    events: Iterable[Event], own: dict[int, int], pool: Iterable[tuple[int, str]], free_number: int
) -> Iterator[Event]:
    """The events without those of the storages `own`; `pool` comes where the first of them did, its
    storages numbered from `free_number` on."""
    is_taken = False
    for event in events:
        if isinstance(event, Allocated | Freed | Tagged) and event.storage in own:
            if not is_taken:
                yield from _pool_events(pool, free_number)
            is_taken = True
        else:
            yield event


def _pool_events(pool: Iterable[tuple[int, str]], number: int) -> Iterator[Event]:
    """`number` is the first storage number that is free."""
    categories: dict[str, Category] = {"saved": "activations", "gradients": "gradients"}
    for storage, (num_bytes, part) in enumerate(pool, number):
        yield Allocated(storage, num_bytes, f"{POOL_LABEL} ({part})")
        if part in categories:
            yield Tagged(storage, categories[part])
