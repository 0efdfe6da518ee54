"""The ledger of a traced module: its storages, categories, work and names."""

from __future__ import annotations

from collections import Counter

import pytest

torch = pytest.importorskip("torch")


from planner.core.schema import TrainSetting  # noqa: E402
from planner.ledger.ledger import Allocated, Computed, Freed, Marked, Tagged  # noqa: E402
from planner.trace.ledger import trace_estimate  # noqa: E402
from tests.trace.models import (  # noqa: E402
    SMALL,
    swin_timm,
)


@pytest.fixture(scope="module")
def timm_ledger():  # type: ignore[no-untyped-def]
    setting = TrainSetting(batch_size=2, precision="bf16")
    return trace_estimate(SMALL, setting, lambda: swin_timm(1))


def test_ledger_sorts_bytes_by_category(timm_ledger) -> None:  # type: ignore[no-untyped-def]
    sizes: dict[int, int] = {}
    category: dict[int, str] = {}
    by_phase: dict[tuple[str, int], Counter[str]] = {}
    for event in timm_ledger.events:
        if isinstance(event, Allocated):
            sizes[event.storage] = event.num_bytes
            category[event.storage] = "temporaries"
        elif isinstance(event, Tagged):
            category[event.storage] = event.category
        elif isinstance(event, Freed):
            sizes.pop(event.storage, None)  # nothing of scratch
        elif isinstance(event, Marked):
            found: Counter[str] = Counter()
            for storage, num_bytes in sizes.items():
                found[category[storage]] += num_bytes
            by_phase[event.phase, event.step] = found
    weights = 4 * timm_ledger.num_parameters
    data = 2 * (3 * 64 * 64 * 4 + 10 * 4)  # images, and soft targets of 10 classes
    end = by_phase["optimizer", 1]
    assert end["parameters"] == end["gradients"] == weights
    assert end["optimizer_state"] == 2 * weights
    assert end["activations"] == data
    assert end["temporaries"] == 0
    assert by_phase["forward", 1]["temporaries"] == by_phase["forward", 1]["gradients"] == 0


def test_ledger_counts_work_and_names_modules(timm_ledger) -> None:  # type: ignore[no-untyped-def]
    work = [(phase, o) for phase, o in timm_ledger.operations()]
    assert {phase for phase, _ in work} == {"forward", "backward", "optimizer"}
    head = next(o for _, o in work if o.path == "head.fc" and o.kind == "matmul")
    assert head == Computed(
        "aten.addmm",
        "matmul",
        "bfloat16",
        2 * 2 * 64 * 10,
        (2 * 64 + 64 * 10 + 10 + 2 * 10) * 2,
        1,
        "head.fc",
    )
    flops = Counter({phase: 0 for phase, _ in work})
    for phase, operation in work:
        if operation.kind in ("matmul", "conv"):
            flops[phase] += operation.flops
    # Backward does each product twice, but for the patch embedding, whose input needs no gradient.
    embedding = next(o.flops for _, o in work if o.kind == "conv")
    assert flops["backward"] == 2 * flops["forward"] - embedding
    assert "aten.gelu" in {o.name for _, o in work if o.kind == "pointwise"}
