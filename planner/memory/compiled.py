"""What `torch.compile` means for an estimate: which ledger it rests on, and how far to trust it.

The ledger of a compiled step is recorded (`planner.recording`). Without one the eager step's ledger
stands in, with a wide range. First these bases, then the memory pool of CUDA graphs. Imports no
torch.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count

from planner.core.schema import TrainSetting
from planner.core.schema.setting import SHARDED
from planner.ledger.ledger import Allocated, Category, Event, Freed, Ledger, PhaseEnded, Tagged
from planner.memory.caching_allocator import round_request

# What a compiled graph runs: kernels that Inductor generates and fuses, and those of libraries.
FUSED_PREFIX = "triton_"
EXTERN_PREFIX = "extern_kernels."
POOL_LABEL = "CUDA graph pool"


@dataclass(frozen=True)
class Basis:
    """What the figures of a compiled step rest on. `low` and `high` are the ends of the range,
    relative to reserved bytes; `notes` says it in words, and `left_out` names what is unknown."""

    low: float
    high: float
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


# On an emulated GPU both peaks are torch's own to the byte; with CUDA graphs reserved bytes lay 0.3
# to 5.6% over (torch 2.14, Swin-T twice, ViT-Ti and ViT-B/32, 2026-11-30; the last is in
# tests/recording/test_replay.py). A device has not judged it: of graphs that were traced and not
# compiled, reserved bytes lay between 0.2% under and 7.3% over those of an H200 (torch 2.11, eleven
# measurements of native Swin-T, bf16, batches of 64 to 768, 2026-11-26, tests/truth/h200). The
# range is two to three times that (inferred).
RECORDED_BASIS = Basis(
    0.85,
    1.2,
    (
        "each compiled graph as torch's own compiler makes it for this card; loss and optimizer "
        "eager",
    ),
    (
        "what the compiler decides by timing kernels: padded strides, scratch of tuned kernels",
        "compilation itself, which takes memory of the host, and the first steps' warm-up",
    ),
)
# The eager step stands for the compiled one. The range holds the published spread (inferred).
EAGER_BASIS = Basis(
    0.55,
    1.25,
    (
        "the eager step in place of the compiled one, with a wide range, and its time with chains "
        "of pointwise kernels taken as fused. --record compiles the step on an emulated GPU, "
        "which takes one to three minutes and is kept, and narrows the range",
    ),
    ("what compilation changes",),
)
_UNTUNED = (
    "kernels of max-autotune no faster than untuned ones: which are depends on the device, and no "
    "estimate knows"
)
_RECOMPUTED_AT_ONCE = "that torch may recompute all checkpointed blocks at once"
# Dynamo breaks the graph, so that it is not recorded.
_BROKEN_GRAPHS = (
    "what compilation changes: it makes several graphs, which are not recorded, so the step is "
    "estimated as eager and the range widened"
)
BROKEN_BASIS = replace(EAGER_BASIS, notes=(), left_out=(_BROKEN_GRAPHS,))


def compiled_basis(setting: TrainSetting, ledger: Ledger) -> Basis:
    """The basis of a compiled step that is estimated from `ledger`."""
    if is_compiled(ledger):
        return RECORDED_BASIS
    return EAGER_BASIS if has_known_graphs(setting) else BROKEN_BASIS


def tuning_assumptions(setting: TrainSetting) -> tuple[str, ...]:
    """What the estimate assumes of kernels that torch would choose by timing them."""
    return (_UNTUNED,) if setting.compile.startswith("max-autotune") else ()


def compiled_left_out(basis: Basis, setting: TrainSetting) -> tuple[str, ...]:
    """What the estimate of the step that `setting` compiles leaves out."""
    if basis is EAGER_BASIS and may_recompute_at_once(setting):
        return (*basis.left_out, _RECOMPUTED_AT_ONCE)
    return basis.left_out


def may_recompute_at_once(setting: TrainSetting) -> bool:
    """Whether one compiled graph holds all checkpointed blocks. torch's partitioner need not save a
    block's input (for timm's `checkpoint_seq` it saves none, torch 2.13); then it recomputes every
    block before the backward of the last one. Blocks that are compiled one by one are recomputed
    one at a time."""
    return setting.checkpointing != "none" and setting.compile_scope == "model"


def has_known_graphs(setting: TrainSetting) -> bool:
    """Whether the graphs that `setting` compiles can be recorded: the model as one graph, or each
    block. Under DDP torch breaks every graph at the ends of its buckets
    (torch/_dynamo/backends/distributed.py). FSDP2 hides its hooks around each unit from Dynamo
    (`_dynamo_disable`), and no recorded graph has weights that come and go."""
    return setting.compile != "off" and setting.parallelism not in ("ddp", *SHARDED)


def is_compiled(ledger: Ledger) -> bool:
    """Whether `ledger` holds kernels of a compiled graph, not only operations of eager code."""
    return any(map(is_kernel, ledger.operation_names))


def is_kernel(name: str) -> bool:
    """Whether `name` is that of a kernel of a compiled graph."""
    return name.startswith((FUSED_PREFIX, EXTERN_PREFIX))


def pool_graph_memory(ledger: Ledger) -> Ledger:
    """The ledger of a compiled step with CUDA graphs, whose forward and backward share one memory
    pool: it is taken whole, at its high-water mark, at the first call, and never given back.

    The pool is three storages: the tensors that forward saves, the gradients, which are made while
    saved tensors die, and the rest. Images are copied into holes of the pool: it grows as the first
    step warms up, and not as the second is recorded (torch 2.11 and 2.14 on an emulated H200).
    """
    pooled_bytes = {
        event.storage: round_request(event.num_bytes)
        for event in ledger.events
        if isinstance(event, Allocated) and is_kernel(event.label)
    }
    size, saved, gradients = _pool_sizes(ledger.events, pooled_bytes)
    gradients = min(size, gradients)
    saved = min(size - gradients, saved)
    pool = ((saved, "saved"), (gradients, "gradients"), (size - gradients - saved, "rest"))
    numbers = (event.storage for event in ledger.events if isinstance(event, Allocated))
    events = tuple(_replace_by_pool(ledger.events, pooled_bytes, pool, max(numbers) + 1))
    note = "CUDA graphs hold a pool of their own at its high-water mark, through the optimizer too"
    return replace(
        ledger,
        events=events,
        notes=(*ledger.notes, note),
        pooled_saved_bytes=saved,
        pool_requests=tuple(_pool_requests(ledger.events, pooled_bytes)),
    )


def _pool_sizes(events: Iterable[Event], pooled_bytes: dict[int, int]) -> tuple[int, int, int]:
    """The live bytes of the pooled storages: at their peak, at the end of the last forward, and at
    the end of the last backward. `pooled_bytes` has their sizes, by storage."""
    live = peak = saved = gradients = 0
    for event in events:
        if isinstance(event, Allocated):
            live += pooled_bytes.get(event.storage, 0)
            peak = max(peak, live)
        elif isinstance(event, Freed):
            live -= pooled_bytes.get(event.storage, 0)
        elif isinstance(event, PhaseEnded) and event.phase == "forward":
            saved = live
        elif isinstance(event, PhaseEnded) and event.phase == "backward":
            gradients = live
    return peak, saved, gradients


def _pool_requests(events: Iterable[Event], pooled_bytes: dict[int, int]) -> Iterator[int]:
    """The requests and releases of the pooled storages, as `planner.memory.replay` takes them."""
    entries = count()
    allocated: dict[int, int] = {}  # storage -> entry of its request
    for event in events:
        if isinstance(event, Allocated | Freed) and event.storage in pooled_bytes:
            entry = next(entries)
            if isinstance(event, Allocated):
                allocated[event.storage] = entry
                yield event.num_bytes
            else:
                yield ~allocated[event.storage]


def _replace_by_pool(
    events: Iterable[Event],
    pooled_bytes: dict[int, int],
    pool: Iterable[tuple[int, str]],
    free_number: int,
) -> Iterator[Event]:
    """The events without those of the pooled storages. The storages of `pool` come in place of the
    first of them, numbered from `free_number` on."""
    is_taken = False
    for event in events:
        if isinstance(event, Allocated | Freed | Tagged) and event.storage in pooled_bytes:
            if not is_taken:
                yield from _pool_events(pool, free_number)
            is_taken = True
        else:
            yield event


def _pool_events(pool: Iterable[tuple[int, str]], free_number: int) -> Iterator[Event]:
    categories: dict[str, Category] = {"saved": "activations", "gradients": "gradients"}
    for storage, (num_bytes, part) in enumerate(pool, free_number):
        yield Allocated(storage, num_bytes, f"{POOL_LABEL} ({part})")
        if part in categories:
            yield Tagged(storage, categories[part])
