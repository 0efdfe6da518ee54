"""FSDP2 by trace: torch's `fully_shard` on fake tensors, held to closed forms and to real ranks."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import distributed, nn  # noqa: E402

from planner.core.errors import PlannerError, UnsupportedError  # noqa: E402
from planner.core.schema import TrainSetting  # noqa: E402
from planner.ledger.ledger import (  # noqa: E402
    Allocated,
    Awaited,
    Computed,
    Event,
    Freed,
    Ledger,
    Marked,
    Sent,
    Tagged,
)
from planner.memory.profile import profile_memory, steady_step  # noqa: E402
from planner.trace.ledger import trace_estimate  # noqa: E402
from planner.trace.run import Trace, trace_training  # noqa: E402
from tests.trace.reading import peak_live_bytes, phase_ends, storages  # noqa: E402
from tests.trace.sharded_models import BLOCKS, IMAGES, WIDTH, Blocks, measure_rank  # noqa: E402

FSDP: dict[str, Any] = {
    "batch_size": 4, "precision": "fp32", "parallelism": "fsdp", "world_size": 8,
}  # fmt: skip
PARAMETERS = sum(p.numel() for p in Blocks().parameters())
# fc1's weight and bias have 256 rows, fc2's 64: eight devices share all of them evenly.
BLOCK = sum(p.numel() for p in Blocks().blocks[0].parameters())
HEAD_ROWS = 10  # of the head's weight and bias: 8 devices have up to 2 of them, 2 devices have 5

WORLDS = (pytest.param(2, marks=pytest.mark.release), 8, 64)


def trace_anew(rank: int = 0, width: int = WIDTH, **changes: Any) -> Trace:
    setting = TrainSetting.model_validate({**FSDP, **changes})
    return trace_training(lambda: Blocks(width), IMAGES, setting, detailed=True, rank=rank)


traced = cache(trace_anew)


def padded(num_devices: int) -> int:
    """Elements of all weights, with rows padded to a multiple of the devices."""
    rows = -(-HEAD_ROWS // num_devices) * num_devices - HEAD_ROWS
    evenly = [p for p in Blocks().parameters() if p.shape[0] != HEAD_ROWS]
    others = sum((-p.shape[0] % num_devices) * p[0].numel() for p in evenly)
    return PARAMETERS + rows * (WIDTH + 1) + others


def steady(trace: Trace) -> list[Event]:
    ends = [k for k, e in enumerate(trace.events) if isinstance(e, Marked)]
    last = [k for k in ends if trace.events[k] == Marked("zero_grad", 0)]
    return list(trace.events[last[0] + 1 :])


def sent(events: list[Event]) -> list[Sent]:
    return [event for event in events if isinstance(event, Sent)]


def tagged_bytes(trace: Trace, category: str) -> int:
    sizes = {e.storage: e.num_bytes for e in trace.events if isinstance(e, Allocated)}
    tagged = {e.storage for e in trace.events if isinstance(e, Tagged) and e.category == category}
    return sum(sizes[storage] for storage in tagged)


@pytest.mark.parametrize("num_devices", WORLDS)
def test_all_ranks_together_hold_the_optimizers_state_once(num_devices: int) -> None:
    first = tagged_bytes(traced(world_size=num_devices), "optimizer_state")
    last = tagged_bytes(traced(num_devices - 1, world_size=num_devices), "optimizer_state")
    # Two numbers of 4 bytes for each of a rank's rows. Rank 0 has them all padded, but for rows
    # that there are not: all 10 of the head's where there are 64 devices are the first 10 ranks'.
    assert first == 8 * padded(num_devices) // num_devices
    rows = -(-HEAD_ROWS // num_devices)
    missing = rows - max(0, HEAD_ROWS - rows * (num_devices - 1))
    assert first - last == 8 * missing * (WIDTH + 1)


@pytest.mark.parametrize("num_devices", WORLDS)
def test_what_a_step_sends_is_each_weight_gathered_twice_and_summed_once(num_devices: int) -> None:
    events = steady(traced(world_size=num_devices))
    whole = 4 * padded(num_devices)
    own = whole - 4 * BLOCKS * BLOCK  # embedding and head, which stay from forward to backward
    gathered = [e.num_bytes for e in sent(events) if e.collective == "all_gather"]
    summed = [e.num_bytes for e in sent(events) if e.collective == "reduce_scatter"]
    assert sum(gathered) == 2 * whole - own
    assert sum(summed) == whole
    assert len(gathered) == 2 * BLOCKS + 1
    assert len(summed) == BLOCKS + 1
    assert {e.group for e in sent(events)} == {"world"}
    # What comes out of the sums lies on their stream, and is the gradients.
    outputs = [e for e in events if isinstance(e, Allocated) and e.stream == "reduce_scatter"]
    assert sum(e.num_bytes for e in outputs) == whole // num_devices


def test_every_collective_is_awaited_once_after_it_was_sent() -> None:
    events = steady(traced())
    seen: Counter[int] = Counter()
    handed_over: set[int] = set()
    for event in events:
        if isinstance(event, Sent):
            handed_over.add(event.handle)
        elif isinstance(event, Awaited):
            assert event.handle in handed_over
            seen[event.handle] += 1
    assert set(seen.values()) == {1}
    assert seen.keys() == handed_over
    # Gradients wait for what computed them. Weights are gathered as soon as the host says so, but
    # for the first ones, which wait for the optimizer.
    follows = [e.follows for e in sent(events) if e.collective == "all_gather"]
    assert follows == [True] + [False] * (2 * BLOCKS)
    assert all(e.follows for e in sent(events) if e.collective == "reduce_scatter")


def test_blocks_free_what_they_gathered_and_the_root_does_not() -> None:
    def weights_after_forward(**changes: Any) -> int:
        alive: dict[int, int] = {}
        for event in steady(traced(**changes)):
            if isinstance(event, Allocated) and event.label == "unsharded weights":
                alive[event.storage] = event.num_bytes
            elif isinstance(event, Freed):
                alive.pop(event.storage, None)
            elif event == Marked("forward", 1):
                return sum(alive.values())
        raise AssertionError

    own = 4 * (padded(8) - BLOCKS * BLOCK)
    assert weights_after_forward() == own
    assert weights_after_forward(fsdp_reshard=False) == own + 4 * BLOCKS * BLOCK
    assert weights_after_forward(fsdp_param_dtype="bf16", precision="bf16") == own // 2


def test_more_devices_never_need_more_memory_each() -> None:
    peaks = [peak_live_bytes(traced(world_size=n)) for n in (8, 64)]
    assert peaks == sorted(peaks, reverse=True)
    assert peak_live_bytes(traced(7)) <= peak_live_bytes(traced(world_size=8))


def test_one_device_holds_what_it_does_without_shards_between_steps() -> None:
    plain, alone = traced(parallelism="none", world_size=1), traced(world_size=1)
    assert not sent(steady(alone))
    assert phase_ends(alone)[-1] == phase_ends(plain)[-1]
    # FSDP2 copies its weights all the same: never less than without.
    assert peak_live_bytes(alone) > peak_live_bytes(plain)


@pytest.mark.parametrize(
    ("changes", "num_sums"),
    [
        pytest.param({}, BLOCKS + 1, marks=pytest.mark.release),
        ({"gradient_sync": "every"}, 2 * (BLOCKS + 1)),
    ],
)
def test_gradients_are_summed_in_the_last_micro_batch_or_in_every_one(
    changes: dict[str, Any], num_sums: int
) -> None:
    events = steady(traced(accumulate=2, **changes))
    assert sum(e.collective == "reduce_scatter" for e in sent(events)) == num_sums


def test_hybrid_shards_are_summed_over_their_copies() -> None:
    events = steady(traced(parallelism="hsdp", fsdp_shard_size=4, clip_grad=True))
    groups = Counter((e.collective, e.group) for e in sent(events))
    assert groups["all_gather", "shard"] == 2 * BLOCKS + 1
    assert groups["reduce_scatter", "shard"] == BLOCKS + 1
    assert groups["all_reduce", "replicate"] == BLOCKS + 1
    # The copies' sum is of one shard; the norm of all gradients, of one number.
    shards = [e.num_bytes for e in sent(events) if e.group == "replicate"]
    assert sum(shards) == padded(4)
    assert groups["all_reduce", "shard"] == 1


def test_each_stream_has_a_pool_of_its_own() -> None:
    ledger = trace_estimate(IMAGES, TrainSetting.model_validate(FSDP), Blocks)
    found = profile_memory(ledger, 0, None)
    assert found.reserved_by_stream.keys() == {"", "all_gather_copy_in", "reduce_scatter"}
    assert sum(found.reserved_by_stream.values()) == found.peak_reserved_bytes
    assert any("rank 0" in note for note in ledger.notes)
    on_one = Ledger(
        tuple(e._replace(stream="") if isinstance(e, Allocated) else e for e in ledger.events),
        ledger.batch_size,
        ledger.num_parameters,
    )
    assert profile_memory(on_one, 0, None).peak_reserved_bytes < found.peak_reserved_bytes
    assert steady_step(on_one).peak_bytes == steady_step(ledger).peak_bytes


def test_copies_of_fsdp_are_work_of_the_stream_that_computes() -> None:
    copies = [e for e in steady(traced()) if isinstance(e, Computed) and e.name[:5] == "fsdp."]
    names = Counter(event.name.removesuffix("_mixed_dtype") for event in copies)  # of torch 2.15
    assert names == {"fsdp.split_with_sizes_copy": 2 * BLOCKS + 1, "fsdp.chunk_cat": BLOCKS + 1}
    # Each reads what was gathered, or the gradients, and writes as much.
    block = [e.num_bytes for e in copies if e.num_bytes == 2 * 4 * BLOCK]
    assert len(block) == 3 * BLOCKS


def test_what_a_dtensor_learns_of_shapes_is_no_memory() -> None:
    # A width that no other test has: only the first trace meets its operations anew.
    first, second = (storages(trace_anew(width=72, clip_grad=True)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(("field", "value"), [("compile", "default"), ("offload", "activations")])
def test_what_no_trace_follows_is_refused(field: str, value: object) -> None:
    setting = TrainSetting.model_validate({**FSDP, field: value})
    with pytest.raises(UnsupportedError, match=f"{field} is {value}") as found:
        trace_estimate(IMAGES, setting, Blocks)
    assert f"Set {field}=" in found.value.way_out


@pytest.fixture
def own_group(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


def test_a_process_of_a_group_is_refused_and_keeps_it(own_group: None) -> None:
    with pytest.raises(UnsupportedError, match="belongs to one already"):
        trace_anew()
    assert distributed.is_initialized()


def test_no_group_is_left_behind() -> None:
    class Fails(Blocks):
        def forward(self, images: Any) -> Any:
            return super().forward(images)[:, 999:].view(3, 7)

    with pytest.raises(PlannerError):
        trace_estimate(IMAGES, TrainSetting.model_validate(FSDP), Fails)
    assert not distributed.is_initialized()
    trace_anew()
    assert not distributed.is_initialized()


def test_a_model_without_blocks_is_one_unit() -> None:
    setting = TrainSetting.model_validate(FSDP)
    events = steady(trace_training(lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, 10)), IMAGES,
                                   setting, rank=0))  # fmt: skip
    assert [e.collective for e in sent(events)] == ["all_gather", "reduce_scatter"]


@pytest.mark.release
@pytest.mark.parametrize("accumulate", [1, 3])
def test_real_ranks_allocate_the_same_in_the_same_order(tmp_path: Path, accumulate: int) -> None:
    """Two processes under gloo, as a probe runs them, one micro-batch and several. What is smaller
    than 512 B is left out: kernels on the CPU make scalars of their own."""
    setting = TrainSetting.model_validate({**FSDP, "world_size": 2, "accumulate": accumulate})
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=measure_rank, args=(r, setting, tmp_path)) for r in (0, 1)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(120)
        assert [process.exitcode for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    for rank in (0, 1):
        lines = (tmp_path / f"rank{rank}").read_text().splitlines()
        real = [int(line.partition(" ")[0]) for line in lines]
        trace = trace_training(Blocks, IMAGES, setting, gradient_sums="in_place", rank=rank)
        asked = [event for event in steady(trace) if isinstance(event, Allocated)]
        # The CPU's copy takes no table.
        ours = [event.num_bytes for event in asked if "chunk_cat" not in event.label]
        assert [size for size in ours if size >= 512] == [size for size in real if size >= 512]
