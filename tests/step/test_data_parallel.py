"""DDP on shapes laid beside torch's own: the buckets it makes and the bytes it holds."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from planner import SwinConfig, TrainSetting, estimate
from planner.affine import Recorder
from planner.errors import UnsupportedError
from planner.estimation import Estimate
from planner.ledger import Allocated, Ledger, Marked
from planner.ledgers import step_ledger
from planner.libraries.registry import find_library
from planner.libraries.resolve import resolve_model
from planner.memory.profile import find_alive
from planner.report.tables import breakdown_table
from planner.schema import DeviceInfo
from planner.step.data_parallel import BUCKET_LABEL, REBUILT_LIMITS, assign_buckets
from planner.step.training import record_training
from planner.training import Training
from planner.units import MIB
from search.space import make_space
from tests import cpu_memory
from tests.building import build_real, on_shapes
from tests.cpu_memory import measure_cpu_memory_events
from tests.equality import phase_ends
from tests.libraries.steps import needs

DDP = TrainSetting(batch_size=2, precision="fp32", parallelism="ddp", attention="eager")
# 9.6 million parameters: three buckets.
SMALL = SwinConfig(
    image_size=(112, 112), depths=(1, 2, 1), num_heads=(2, 4, 8), embed_dim=192, num_classes=10,
    drop_path_rate=0.0,
)  # fmt: skip


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


@given(st.lists(st.integers(1, 12 * MIB), min_size=1, max_size=60))
@settings(max_examples=50, deadline=None)
def test_a_bucket_closes_where_torch_closes_it(sizes: list[int]) -> None:
    tensors = [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes]
    # The last argument says that the order is that of readiness, so that nothing is sorted.
    found, _ = dist._compute_bucket_assignment_by_size(
        tensors, list(REBUILT_LIMITS), [False] * len(sizes), list(range(len(sizes)))
    )
    assert assign_buckets(sizes, REBUILT_LIMITS) == found


# torch 2.13, CPU, gloo, world 1, timm 1.0.31 (2026-11-21): `rebuilt_bucket_sizes` of
# `_get_ddp_logging_data()` after the second step.
SWIN_BASE = [
    4_100_000, 33_583_104, 33_612_928, 33_617_024, 29_432_384, 26_295_424, 28_403_392, 29_441_152,
    29_443_200, 26_295_424, 28_403_392, 29_441_152, 19_004_320,
]  # fmt: skip


def test_the_buckets_of_a_swin_base_are_those_of_a_real_one() -> None:
    model = resolve_model("timm:swin_base_patch4_window7_224")
    assert bucket_bytes(step_ledger(model, DDP)) == SWIN_BASE
    assert sum(SWIN_BASE) == 4 * 87_768_224


@needs("timm", "torchvision", "transformers")
@pytest.mark.parametrize(
    ("library", "checkpointing"),
    [
        ("native", "blocks"),
        *(
            pytest.param(library, "none", marks=pytest.mark.combinations)
            for library in ("native", "timm", "torchvision", "transformers")
        ),
    ],
)
def test_buckets_are_those_that_ddp_makes_of_the_real_module(
    group: None, library: str, checkpointing: str
) -> None:
    model = SMALL.model_copy(update={"library": library})
    spec = find_library(model.library)
    setting = spec.resolve(model, DDP.model_copy(update={"checkpointing": checkpointing}))
    ledger = record_training(on_shapes(model, setting), model, setting)
    module = build_real(model, setting)
    wrapped = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), 1e-3)
    for _ in range(3):
        output = wrapped(torch.randn(1, 3, 112, 112))
        logits = output if isinstance(output, Tensor) else output.logits
        nn.functional.cross_entropy(logits, torch.zeros(1, dtype=torch.int64)).backward()
        optimizer.zero_grad()
    said = wrapped._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    assert bucket_bytes(ledger) == [int(size) for size in said.split(",")]


@pytest.mark.parametrize(
    "changes",
    [
        {"accumulate": 2},
        pytest.param({}, marks=pytest.mark.combinations),
        pytest.param({"frozen_stages": 1}, marks=pytest.mark.combinations),
    ],
)
def test_a_step_holds_what_it_does_on_a_cpu(group: None, changes: dict[str, int]) -> None:
    setting = DDP.model_copy(update={"optimizer": "sgd-forloop", **changes})
    ledger = record_training(on_shapes(SMALL, setting), SMALL, setting)

    def wrapped(module: nn.Module, *rest: object) -> Training:
        call = DistributedDataParallel(module)
        return Training(module, *rest, compiled=call)  # type: ignore[arg-type]

    with mock.patch.object(cpu_memory, "Training", wrapped):
        real = measure_cpu_memory_events(lambda: build_real(SMALL, setting), SMALL, setting)
    for mine, theirs in zip(phase_ends(ledger.events), phase_ends(real.events), strict=True):
        assert mine[:2] == theirs[:2]
        # DDP keeps a few numbers on the host, which is here the device.
        assert theirs[2] == pytest.approx(mine[2], abs=4096)
        assert theirs[3] == pytest.approx(mine[3], abs=4096)


def of(**changes: object) -> Estimate:
    setting = DDP.model_copy(update={"attention": "library"})
    return estimate(SMALL, setting, **changes)


@pytest.mark.parametrize("changes", [{}, {"frozen_stages": 1}, {"precision": "pure-bf16"}])
def test_the_estimate_holds_the_buckets_besides_the_gradients(changes: dict[str, object]) -> None:
    """Derived: as many bytes as the parameters that are trained, rounded once a bucket."""
    with_buckets, without = of(**changes), of(**changes, parallelism="none")
    ledger = step_ledger(SMALL, with_buckets.setting)
    start = next(
        i for i, e in enumerate(ledger.events) if isinstance(e, Marked) and e.step == 1
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
    assert any("NCCL" in line and "GB" in line for line in found.left_out)
    assert "gradients, DDP buckets" in breakdown_table(found)
    assert not any("DistributedDataParallel" in line for line in of(parallelism="none").assumed)
    over_two = of(parallelism="none", world_size=2)
    assert any("parallelism=ddp counts the buckets" in line for line in over_two.left_out)


def test_a_step_under_ddp_repeats_so_that_any_batch_is_read_off_a_line() -> None:
    def record(batch_size: int) -> Ledger:
        at_batch = DDP.model_copy(update={"batch_size": batch_size})
        return record_training(on_shapes(SMALL, DDP), SMALL, at_batch)

    recorder = Recorder(record)
    recorder.ledger(2)
    assert recorder.ledger(5) == recorder.record(5)
    assert recorder.affine is not None


def test_compilation_under_ddp_is_taken_for_broken_into_several_graphs() -> None:
    eager, compiled = of(), of(compile="reduce-overhead")
    assert compiled.device_total_bytes == eager.device_total_bytes
    assert any("several graphs" in line for line in compiled.left_out)


def test_a_probe_knows_no_ddp_and_a_search_says_so_before_the_first() -> None:
    card = DeviceInfo(kind="cuda", name="A100", total_bytes=2**36, capability=(8, 0))
    with pytest.raises(UnsupportedError, match=r"(?s)DDP.*'ddp'.*planner estimate") as raised:
        make_space(SMALL, card, DDP)
    assert "parallelism none" in str(raised.value)
