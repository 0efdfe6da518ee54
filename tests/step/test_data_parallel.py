"""DDP on shapes laid beside torch's own: the buckets it makes and the bytes it holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from planner import SwinConfig, TrainSetting, estimate
from planner.core.errors import UnsupportedError
from planner.core.schema import ResolvedSetting
from planner.core.units import MIB
from planner.estimation.estimate import Estimate
from planner.estimation.ledgers import step_ledger
from planner.ledger.ledger import Allocated, Awaited, Freed, Ledger, Marked, Sent
from planner.machine.hardware import overheads
from planner.step.reducer import (
    BUCKET_LABEL,
    DEFAULT_LIMITS,
    Weight,
    assign_buckets,
)
from planner.step.training import record_training
from planner.training.parallel.data_parallel import DataParallel
from tests.building import build_real, on_shapes

DDP = TrainSetting(batch_size=2, precision="fp32", parallelism="ddp", attention="eager")
# 9.6 million parameters: three buckets.
SMALL = SwinConfig(
    image_size=(112, 112), depths=(1, 2, 1), num_heads=(2, 4, 8), embed_dim=192, num_classes=10,
    drop_path_rate=0.0,
)  # fmt: skip


# 0.6 million parameters: two buckets by torch's limits.
TWO_BUCKETS = SMALL.model_copy(
    update={"image_size": (56, 56), "depths": (1, 1), "num_heads": (2, 4), "embed_dim": 96}
)


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A group of one process: what DDP holds does not depend on how many there are."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def bucket_bytes(ledger: Ledger) -> list[int]:
    """Those of the steady step, in order."""
    asked = [e for e in ledger.events if isinstance(e, Allocated) and e.label == BUCKET_LABEL]
    return [event.num_bytes for event in asked[1:]]


def made_with(ledger: Ledger) -> list[int]:
    """Those that the model is wrapped with, in the order in which they are reduced."""
    built = next(i for i, e in enumerate(ledger.events) if isinstance(e, Marked))
    asked = [e for e in ledger.events[:built] if isinstance(e, Allocated)]
    return [event.num_bytes for event in asked if event.label == BUCKET_LABEL]


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@given(
    st.lists(st.tuples(st.integers(1, 3 * MIB), st.sampled_from(tuple(DTYPES))), min_size=1),
    st.sampled_from([DEFAULT_LIMITS, (MIB,), (5 * MIB, 7 * MIB, MIB)]),
)
@settings(max_examples=50, deadline=None)
def test_a_bucket_closes_where_torch_closes_it(
    asked: list[tuple[int, str]], limits: tuple[int, ...]
) -> None:
    tensors = [torch.empty(numel, dtype=DTYPES[name], device="meta") for numel, name in asked]
    weights = [
        Weight(t.numel(), name, t.nbytes) for t, (_, name) in zip(tensors, asked, strict=True)
    ]
    found, _ = dist._compute_bucket_assignment_by_size(
        tensors, list(limits), [False] * len(tensors)
    )
    assert sorted(assign_buckets(weights, limits), key=min) == found
    # The last argument says that the order is that of readiness, so that nothing is sorted.
    of_one = [t for t, (_, name) in zip(tensors, asked, strict=True) if name == "float32"]
    if of_one:
        found, _ = dist._compute_bucket_assignment_by_size(
            of_one, list(limits), [False] * len(of_one), list(range(len(of_one)))
        )
        assert assign_buckets([w for w in weights if w.dtype == "float32"], limits) == found


REDUCED: list[dict[str, Any]] = [
    {"ddp_bucket_mb": 5}, {"ddp_find_unused": True, "ddp_bucket_mb": 25},
    {"ddp_static_graph": True},
]  # fmt: skip


@pytest.mark.parametrize("changes", REDUCED, ids=str)
def test_buckets_are_those_of_torchs_own_reducer(group: None, changes: dict[str, Any]) -> None:
    setting = DDP.model_copy(update=changes)
    ledger = record_training(on_shapes(SMALL, setting), SMALL, setting)
    module = build_real(SMALL, setting)
    wrapped = DataParallel(module, setting, torch.device("cpu")).module
    for _ in range(2 if setting.ddp_static_graph else 1):
        wrapped(torch.randn(1, 3, *SMALL.image_size)).sum().backward()
        module.zero_grad()
    wrapped.reducer._rebuild_buckets()  # as the next forward does, which writes down what there is
    wrapped.logger.set_runtime_stats_and_log()
    said = wrapped._get_ddp_logging_data()
    assert made_with(ledger) == [int(size) for size in said["bucket_sizes"].split(",")]
    rebuilt = [int(size) for size in said.get("rebuilt_bucket_sizes", "").split(",") if size]
    if setting.ddp_find_unused:
        assert not rebuilt
    else:
        assert bucket_bytes(ledger) == rebuilt


def freed_after(ledger: Ledger, label: str) -> list[tuple[int, int]]:
    """For each storage with `label` that is freed: the marks before its end, and how many
    all-reduces were handed over since the last of them."""
    storages = {e.storage for e in ledger.events if isinstance(e, Allocated) and e.label == label}
    found, marks, sent = [], 0, 0
    for event in ledger.events:
        if isinstance(event, Marked):
            marks, sent = marks + 1, 0
        elif isinstance(event, Sent):
            sent += event.collective == "all_reduce"
        elif isinstance(event, Freed) and event.storage in storages:
            found.append((marks, sent))
    return found


# Marks: the end of the build, then of forward, backward, the optimizer and zero_grad of each step.
SECOND_BACKWARD, THIRD_BACKWARD = 6, 10
REBUILT: list[tuple[dict[str, bool], int]] = [
    ({}, SECOND_BACKWARD), ({"ddp_bucket_view": True}, SECOND_BACKWARD),
    ({"ddp_static_graph": True}, THIRD_BACKWARD),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "backward"), REBUILT)
def test_nccl_holds_the_first_bucket_into_the_backward_after_the_rebuild(
    changes: dict[str, bool], backward: int
) -> None:
    """It goes with the first collective of a backward after the one that summed it."""
    setting = DDP.model_copy(update=changes)
    ledger = record_training(on_shapes(SMALL, setting), SMALL, setting)
    assert freed_after(ledger, BUCKET_LABEL) == [(backward, 1)]
    first = sum(made_with(ledger))
    assert (ledger.doubtful_bytes, ledger.late_bytes) == (first, first)
    never = DDP.model_copy(update={"ddp_find_unused": True})
    kept = record_training(on_shapes(SMALL, never), SMALL, never)
    assert not freed_after(kept, BUCKET_LABEL)
    assert kept.doubtful_bytes == kept.late_bytes == 0


def of(**changes: object) -> Estimate:
    setting = DDP.model_copy(update={"attention": "library"})
    return estimate(SMALL, setting, **changes)


def sent_and_awaited(**changes: object) -> list[tuple[str, Any]]:
    """(phase, event) of the steady step."""
    setting = DDP.model_copy(update={"attention": "eager", **changes})
    events = step_ledger(SMALL, ResolvedSetting(setting)).events
    found: list[tuple[str, Any]] = []
    run: list[Any] = []
    for event in events:
        if isinstance(event, Sent | Awaited):
            run.append(event)
        elif isinstance(event, Marked):
            found += [(event.phase, e) for e in run if event.step == 1]
            run = []
    return found


@pytest.mark.parametrize("changes", [{}, {"accumulate": 2}])
def test_each_bucket_is_sent_in_its_order_and_awaited_at_the_end(changes: dict[str, Any]) -> None:
    """With no_sync only one of two micro-batches sends."""
    found = [e for phase, e in sent_and_awaited(**changes) if phase == "backward"]
    sent = [e for e in found if isinstance(e, Sent)]
    assert {(e.collective, e.group, e.follows, e.dtype) for e in sent} == {
        ("all_reduce", "world", True, "float32")
    }
    setting = DDP.model_copy(update=changes)
    assert [e.num_bytes for e in sent] == bucket_bytes(step_ledger(SMALL, ResolvedSetting(setting)))
    assert found == [*sent, *(Awaited(e.handle) for e in sent)]


def test_nccls_own_buffers_lie_beside_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """MiB: derived and quoted in planner/machine/hardware/nccl.py. Reserved memory is here as sure
    on several devices as on one."""
    monkeypatch.setattr(overheads, "RESERVED_ERROR_UNTRIED", overheads.RESERVED_ERROR)
    one, several = of(), of(world_size=8)
    assert "communication" not in one.breakdown
    taken = several.breakdown["communication"]
    assert several.device_total_bytes == one.device_total_bytes + taken
    assert (several.low_bytes - one.low_bytes) // MIB == 24
    assert round((several.high_bytes - one.high_bytes) / MIB) in (1010, 1011)
    assert one.peak_reserved_bytes == several.peak_reserved_bytes


def test_a_static_graph_within_no_sync_is_refused_since_torch_fails_there(group: None) -> None:
    with pytest.raises(UnsupportedError, match="no_sync forbids") as refused:
        of(ddp_static_graph=True, accumulate=2)
    assert "gradient_sync=every" in str(refused.value)
    of(ddp_static_graph=True, accumulate=2, gradient_sync="every")
    wrapped = DistributedDataParallel(nn.Linear(2, 2), static_graph=True)
    with wrapped.no_sync(), pytest.raises(RuntimeError, match="expect_autograd_hooks_"):
        wrapped(torch.ones(1, 2)).sum().backward()


def test_a_search_for_unused_parameters_is_refused_where_checkpointing_hides_them() -> None:
    """torch: "mark a variable ready only once"."""
    reentrant = SMALL.model_copy(update={"library": "microsoft"})
    changes = {"checkpointing": "blocks", "ddp_find_unused": True}
    with pytest.raises(UnsupportedError, match=r"(?s)reentrant.*ddp_static_graph=true"):
        estimate(reentrant, DDP, **changes)
    estimate(reentrant, DDP, **changes, ddp_static_graph=True)
