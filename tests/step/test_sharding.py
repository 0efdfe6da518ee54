"""FSDP2 on shapes laid beside torch's own under the fake process group: event by event the same.

Shown with torch 2.13.0. Equal are every allocation in order, in bytes and by stream (scratch of
attention rounded to the allocator's 512 B), the releases between two allocations, and what is sent
and awaited.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from planner.core.errors import UnsupportedError
from planner.core.schema import ResolvedSetting, SwinConfig, TrainSetting
from planner.core.units import MIB
from planner.estimation.ledgers import is_on_shapes
from planner.ledger.affine import Recorder, in_canonical_order
from planner.ledger.ledger import Allocated, Awaited, Event, Freed, Ledger, Marked, Sent
from planner.libraries.registry import find_library
from planner.libraries.resolve import resolve_model
from planner.memory.caching_allocator import rounded
from planner.step.training import record_training
from tests.equality import collectives, phase_ends
from tests.libraries.steps import Changes, generator_state_uncounted, name_of, needs, require

pytestmark = needs("torch", "timm")

# Three blocks, of rows that 8 devices do not share evenly.
SMALL: dict[str, Any] = {
    "image_size": 56, "depths": (2, 1), "num_heads": (3, 6), "embed_dim": 48, "num_classes": 10,
}  # fmt: skip
ONE_BLOCK = {"depths": (1,), "num_heads": (3,)}
FSDP: Changes = {"batch_size": 2, "precision": "fp32", "parallelism": "fsdp", "world_size": 8}
HSDP: Changes = {"parallelism": "hsdp", "fsdp_shard_size": 2}
PLAIN: Changes = {"loss": "cross-entropy", "clip_grad": False}
BF16: Changes = {"precision": "bf16", "fsdp_param_dtype": "bf16"}


def small(library: str = "timm", version: int = 1, **changes: Any) -> SwinConfig:
    return SwinConfig.model_validate({"library": library, "version": version, **SMALL, **changes})


def resolved(config: SwinConfig, changes: Changes) -> ResolvedSetting:
    return find_library(config.library).resolve(config, TrainSetting(**{**FSDP, **changes}))


def recorded(config: SwinConfig, setting: ResolvedSetting, rank: int = 0) -> Ledger:
    build = find_library(config.library).on_shapes(config, setting)
    return record_training(build, config, setting, in_place_sums=False, rank=rank)


def rows_of(events: Iterable[Event]) -> list[tuple[Any, ...]]:
    """The events of the steps: allocations with bytes and stream, releases between them sorted."""
    sizes: dict[int, tuple[int, str]] = {}
    rows: list[tuple[Any, ...]] = []
    freed: list[tuple[int, str]] = []
    for event in events:
        if isinstance(event, Freed):
            freed += [sizes.pop(event.storage)] if event.storage in sizes else []
            continue
        if not isinstance(event, Allocated | Marked):
            continue
        is_scratch = isinstance(event, Allocated) and "attention" in event.label
        if isinstance(event, Allocated):
            size = rounded(event.num_bytes) if is_scratch else event.num_bytes
            sizes[event.storage] = size, event.stream
            if not size:
                continue
        if any(size for size, _ in freed):
            rows.append(("freed", *sorted(pair for pair in freed if pair[0])))
        freed.clear()
        if isinstance(event, Allocated):
            rows.append(("allocated", *sizes[event.storage]))
        elif event.phase == "build":
            rows.clear()
        else:
            rows.append(("end of", event.phase, event.step))
    return rows


def assert_as_torch_does(config: SwinConfig, changes: Changes, rank: int = 0) -> None:
    from tests.fake_sharding import trace_sharded

    require(config.library)
    setting = resolved(config, changes)
    assert is_on_shapes(config, setting)
    on_shapes = recorded(config, setting, rank % setting.shard_size).events
    traced = trace_sharded(config, setting, rank)
    ours, theirs = rows_of(on_shapes), rows_of(traced)
    for place, (mine, real) in enumerate(zip(ours, theirs, strict=False)):
        assert mine == real, f"row {place}: {ours[place - 5 : place]}"
    assert len(ours) == len(theirs)
    assert collectives(on_shapes) == collectives(traced)


@pytest.mark.parametrize(
    ("changes", "rank"),
    [
        ({"world_size": 64, "checkpointing": "blocks", "accumulate": 2}, 63),
        ({**HSDP, **BF16, "clip_grad": True}, 7),
    ],
    ids=name_of,
)
def test_worlds_and_ranks(changes: Changes, rank: int) -> None:
    assert_as_torch_does(small(**ONE_BLOCK), changes, rank)


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "fp16", "clip_grad": True, "zero_grad_to_none": False, "ema": True},
        {**BF16, "world_size": 1, "validation_batch_size": 3, "optimizer": "lion-forloop"},
    ],
    ids=name_of,
)
def test_optimizer_steps_on_shards(changes: Changes) -> None:
    assert_as_torch_does(small(**ONE_BLOCK), changes)


def test_real_tensors_on_the_cpu() -> None:
    """Ends of phases, and the peak within each, where gradients are summed in place, as fake
    tensors never are. Rows divide by 2: CPU kernels pad what does not, and CUDA's do not."""
    from planner.trace.sharding import fake_world
    from planner.training.tasks import as_task
    from planner.training.tasks.blocks import blocks_to_shard
    from tests.cpu_memory import measure_cpu_memory_events

    sides = {"depths": (1, 1), "num_heads": (6, 12), "embed_dim": 96, "drop_path_rate": 0.0}
    config = small(version=2, **sides)
    setting = resolved(config, {"world_size": 2, "attention": "eager"})
    spec = find_library("timm")
    ledger = record_training(spec.on_shapes(config, setting), config, setting)
    with fake_world(setting, 0) as sharding, generator_state_uncounted():

        def build() -> Any:
            module = spec.build(config, setting)
            sharding.shard(
                module, blocks_to_shard(module, as_task(module, config, setting), config)
            )
            return module

        # The module is sharded as it is built: nothing is left to spread.
        alone = setting.model_copy(update={"parallelism": "none"})
        real = measure_cpu_memory_events(build, config, alone)
    assert phase_ends(ledger.events) == phase_ends(real.events)


def test_of_swin_b_as_measured() -> None:
    """timm's Swin-B at batch 4 on the first of 8 devices, fp32, as torch 2.13's own `fully_shard`
    gave it on fake tensors, with plain cross-entropy: most bytes alive in the steady step, in all
    and by stream."""
    config = resolve_model("timm:swin_base_patch4_window7_224")
    assert isinstance(config, SwinConfig)
    setting = resolved(config, {"batch_size": 4, "attention": "eager", **PLAIN})
    ledger = recorded(config, setting)
    streams = ("all_gather_copy_in", "reduce_scatter", "")
    peaks = [round(peak_bytes(ledger, only) / MIB, 1) for only in (None, *streams)]
    assert peaks == [1149.1, 96.1, 41.9, 1131.0]
    said = " ".join(ledger.notes)
    assert "over 8 devices" in said
    assert "the figures are those of rank 0" in said


def peak_bytes(ledger: Ledger, stream: str | None) -> int:
    """Most bytes alive in the second step, on one stream or in all; sizes are not rounded."""
    sizes: dict[int, int] = {}
    peak = step = 0
    for event in ledger.events:
        if isinstance(event, Allocated) and stream in (None, event.stream):
            sizes[event.storage] = event.num_bytes
            if step:
                peak = max(peak, sum(sizes.values()))
        elif isinstance(event, Freed):
            sizes.pop(event.storage, None)
        elif isinstance(event, Marked) and event.phase == "zero_grad":
            step = event.step + 1
    return peak


@pytest.mark.parametrize("changes", [{}, {"accumulate": 2, "clip_grad": True}, HSDP], ids=name_of)
def test_each_collective_is_awaited_once(changes: Changes) -> None:
    config = small()
    events = recorded(config, resolved(config, changes)).events
    sent = [event.handle for event in events if isinstance(event, Sent)]
    awaited = [event.handle for event in events if isinstance(event, Awaited)]
    assert sent == [*range(1, len(sent) + 1)]
    copied = [e.handle for e in events if isinstance(e, Sent) and e.group == "replicate"]
    steps = copied[: len(copied) // 2], copied[len(copied) // 2 :]
    before_the_last = {handle for step in steps for handle in step[:-1]}
    assert sorted(awaited) == [handle for handle in sent if handle not in before_the_last]


def test_any_batch_is_read_off_one_line() -> None:
    """A sum over fewer than 128 soft targets, as of 5 × 10 classes, loads one at a time."""
    config = small(num_classes=128)
    setting = resolved(config, {**BF16, "accumulate": 2})

    def record(batch_size: int) -> Ledger:
        return recorded(config, setting.model_copy(update={"batch_size": batch_size}))

    derived = Recorder(record).line().ledger(5)
    assert in_canonical_order(derived.events) == in_canonical_order(record(5).events)


def test_what_shapes_do_not_follow_is_traced() -> None:
    config = small()
    assert is_on_shapes(config, resolved(config, {}))
    for changes in (
        {"fsdp_param_dtype": "bf16"}, {"precision": "bf16", "fsdp_param_dtype": "fp16"},
        {"checkpointing": "stages"}, {"offload": "activations"}, {"lora_rank": 4},
        {"frozen_stages": 1}, {"optimizer": "adamw-8bit"},
    ):  # fmt: skip
        assert not is_on_shapes(config, resolved(config, changes)), changes
    reentrant = small("microsoft")
    assert not is_on_shapes(reentrant, resolved(reentrant, {"checkpointing": "blocks"}))


@pytest.mark.parametrize(
    "changes", [{"memory_format": "channels_last"}, {"optimizer": "sgd-fused"}], ids=name_of
)
def test_what_torch_raises_on_is_refused(changes: Changes) -> None:
    from tests.fake_sharding import trace_sharded

    config = small(**ONE_BLOCK)
    ((field, value),) = changes.items()
    with pytest.raises(UnsupportedError, match=f"(?s)FSDP2.*{field} is {value}"):
        resolved(config, changes)
    setting = resolved(config, {}).model_copy(update=changes)
    with pytest.raises((NotImplementedError, RuntimeError), match=r"contiguous|strategy|placement"):
        trace_sharded(config, setting)
