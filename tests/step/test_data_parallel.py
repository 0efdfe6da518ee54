"""DDP on shapes laid beside torch's own: the buckets it makes and the bytes it holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from planner import SwinConfig, TrainSetting, estimate
from planner.core.errors import UnsupportedError
from planner.core.schema import ResolvedSetting
from planner.core.units import MIB
from planner.estimation.estimate import Estimate
from planner.estimation.ledgers import step_ledger
from planner.ledger.ledger import Allocated, Awaited, Freed, Ledger, Marked, Sent
from planner.machine.hardware import overheads
from planner.memory.profile import find_alive, steady_step
from planner.step.reducer import (
    BUCKET_LABEL,
    COMPRESSED_LABEL,
    DEFAULT_LIMITS,
    Weight,
    assign_buckets,
    steps_until_steady,
)
from planner.step.training import record_training
from planner.trace.run import trace_training
from planner.training.parallel.data_parallel import DataParallel
from tests.answers import estimate_text
from tests.building import build_real, on_shapes
from tests.cpu_memory import measure_cpu_memory_events
from tests.equality import collectives, first_difference, phase_ends

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


def test_a_step_holds_what_it_does_on_a_cpu(group: None) -> None:
    setting = DDP.model_copy(update={"optimizer": "sgd-forloop", "accumulate": 2})
    config, steps = TWO_BUCKETS, steps_until_steady(setting)
    ledger = record_training(on_shapes(config, setting), config, setting)
    real = measure_cpu_memory_events(lambda: build_real(config, setting), config, setting, steps)
    # NCCL holds the first buckets into the second backward; gloo lets them go at once.
    held = {("zero_grad", 0), ("forward", 1), ("backward", 1)}
    for mine, theirs in zip(phase_ends(ledger.events), phase_ends(real.events), strict=True):
        assert mine[:2] == theirs[:2]
        if mine[:2] in held:
            continue
        # DDP keeps a few numbers on the host, which is here the device.
        assert theirs[2] == pytest.approx(mine[2], abs=4096)
        assert theirs[3] == pytest.approx(mine[3], abs=4096)


@pytest.mark.parametrize(
    "changes", [{"ddp_bucket_view": True, "accumulate": 2}, {"ddp_compression": "fp16"}], ids=str
)
def test_a_trace_of_the_real_module_has_the_same_events(changes: dict[str, Any]) -> None:
    setting = DDP.model_copy(update=changes)
    config = TWO_BUCKETS
    ledger = record_training(on_shapes(config, setting), config, setting, in_place_sums=False)
    trace = trace_training(lambda: build_real(config, setting), config, setting, detailed=True)
    difference = first_difference(ledger.events, trace.events)
    assert not difference, difference
    assert collectives(ledger.events) == collectives(trace.events)


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


def test_nccl_holds_compressed_copies_until_the_next_backward() -> None:
    setting = DDP.model_copy(update={"ddp_compression": "bf16"})
    ledger = record_training(on_shapes(SMALL, setting), SMALL, setting)
    trained = sum(made_with(ledger))
    count = len(bucket_bytes(ledger))
    assert freed_after(ledger, COMPRESSED_LABEL) == [
        (SECOND_BACKWARD, 1), *[(THIRD_BACKWARD, 1)] * count
    ]  # fmt: skip
    plain = record_training(on_shapes(SMALL, DDP), SMALL, DDP)
    more = steady_step(ledger).before_step - steady_step(plain).before_step
    assert more == pytest.approx(trained / 2, abs=512 * count)
    assert ledger.late_bytes == 2 * trained


def of(**changes: object) -> Estimate:
    setting = DDP.model_copy(update={"attention": "library"})
    return estimate(SMALL, setting, **changes)


@pytest.mark.parametrize("changes", [{}, {"frozen_stages": 1, "precision": "pure-bf16"}])
def test_the_estimate_holds_the_buckets_besides_the_gradients(changes: dict[str, object]) -> None:
    """Derived: as many bytes as the parameters that are trained, rounded once a bucket."""
    with_buckets, without = of(**changes), of(**changes, parallelism="none")
    ledger = step_ledger(SMALL, with_buckets.setting)
    start = next(
        i for i, e in enumerate(ledger.events) if isinstance(e, Marked) and e.step == 2
    )  # the end of the steady forward: no gradient is there
    held = [(e, c) for e, c in find_alive(ledger.events, start) if e.label == BUCKET_LABEL]
    assert {category for _, category in held} == {"gradients"}
    more = sum(-(-event.num_bytes // 512) * 512 for event, _ in held)
    trained = with_buckets.num_parameters * (2 if "precision" in changes else 4)
    assert more >= trained if "frozen_stages" not in changes else 0 < more < trained
    assert with_buckets.peak_live_bytes == without.peak_live_bytes + more
    assert with_buckets.breakdown["gradients"] == without.breakdown["gradients"] + more


def test_the_estimate_says_what_ddp_it_means_and_what_it_leaves_out() -> None:
    found = of()
    assert any("3 gradient buckets" in line for line in found.assumed)
    assert any("NCCL" in line for line in found.left_out)
    assert "gradients, DDP buckets" in estimate_text(found)
    assert "gradients in DDP buckets" in estimate_text(of(ddp_bucket_view=True))
    assert any("never rebuilt" in line for line in of(ddp_find_unused=True).assumed)
    assert not any("DistributedDataParallel" in line for line in of(parallelism="none").assumed)
    over_two = of(parallelism="none", world_size=2)
    assert any("--parallelism ddp counts them" in line for line in over_two.left_out)


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


@pytest.mark.parametrize(("world_size", "low", "high"), [(2, 24, 657), (8, 24, 1011)])
def test_nccls_own_buffers_lie_beside_the_context(
    monkeypatch: pytest.MonkeyPatch, world_size: int, low: int, high: int
) -> None:
    """MiB: derived and quoted in planner/machine/hardware/nccl.py. Reserved memory is here as sure
    on several devices as on one."""
    monkeypatch.setattr(overheads, "RESERVED_ERROR_UNTRIED", overheads.RESERVED_ERROR)
    one, several = of(), of(world_size=world_size)
    assert "communication" not in one.breakdown
    taken = several.breakdown["communication"]
    assert several.device_total_bytes == one.device_total_bytes + taken
    assert sum(several.breakdown.values()) == several.device_total_bytes
    assert (several.low_bytes - one.low_bytes) // MIB == low
    assert round((several.high_bytes - one.high_bytes) / MIB) in (high - 1, high)
    assert one.peak_reserved_bytes == several.peak_reserved_bytes
    table = estimate_text(several)
    assert "NCCL's own buffers" in table
    assert "CUDA context, NCCL (as nvidia-smi)" in table
    assert of(world_size=8, parallelism="none").device_total_bytes < several.device_total_bytes


def test_a_static_graph_within_no_sync_is_refused_since_torch_fails_there(group: None) -> None:
    with pytest.raises(UnsupportedError, match="no_sync forbids") as refused:
        of(ddp_static_graph=True, accumulate=2)
    assert "gradient_sync=every" in str(refused.value)
    of(ddp_static_graph=True, accumulate=2, gradient_sync="every")
    wrapped = DistributedDataParallel(nn.Linear(2, 2), static_graph=True)
    with wrapped.no_sync(), pytest.raises(RuntimeError, match="expect_autograd_hooks_"):
        wrapped(torch.ones(1, 2)).sum().backward()


def test_a_search_for_unused_parameters_is_refused_where_checkpointing_hides_them(
    group: None,
) -> None:
    reentrant = SMALL.model_copy(update={"library": "microsoft"})
    changes = {"checkpointing": "blocks", "ddp_find_unused": True}
    with pytest.raises(UnsupportedError, match=r"(?s)reentrant.*ddp_static_graph=true"):
        estimate(reentrant, DDP, **changes)
    estimate(reentrant, DDP, **changes, ddp_static_graph=True)
    layer = nn.Linear(2, 2)
    wrapped = DistributedDataParallel(Reentrant(layer), find_unused_parameters=True)
    output = wrapped(torch.ones(1, 2, requires_grad=True))
    with pytest.raises(RuntimeError, match="mark a variable ready only once"):
        output.sum().backward()


class Reentrant(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(2, 2), layer

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.layer, self.first(x), use_reentrant=True)
