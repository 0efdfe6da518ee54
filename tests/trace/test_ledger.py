"""The ledger of a traced module: its storages, categories, work and names."""

from __future__ import annotations

from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from planner.core.schema import FactoryModel, TrainSetting  # noqa: E402
from planner.estimation.estimate import estimate_ledger  # noqa: E402
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


def test_a_setting_checkpoints_the_blocks_of_any_module() -> None:
    """Those that are found, or those that its task names; the notes state which."""
    model = FactoryModel(factory="tests:none", image_size=(64, 64), num_classes=10)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(48, 192), nn.Linear(192, 48)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.narrow(F.gelu(self.wide(x)))

    def build() -> nn.Module:
        return nn.Sequential(
            nn.PixelUnshuffle(4), nn.Flatten(2), nn.Linear(256, 48), Layer(), Layer(), Layer(),
            nn.Flatten(), nn.Linear(48 * 48, 10),
        )  # fmt: skip

    class Named:
        def module(self) -> nn.Module:
            return build()

        def batch(self, size: int, device: torch.device) -> Tensor:
            return torch.randn(size, 3, 64, 64, device=device)

        def loss(self, module: nn.Module, batch: Tensor) -> Tensor:
            return module(batch).square().mean()

        def blocks(self, module: nn.Module) -> list[nn.Module]:
            return [module[3]]

    plain, wrapped = (
        trace_estimate(model, TrainSetting(batch_size=4, checkpointing=kind), build)
        for kind in ("none", "blocks")
    )
    named = trace_estimate(model, TrainSetting(batch_size=4, checkpointing="blocks"), Named)
    assert wrapped.notes[-1] == "checkpointed: 3 Layer"
    assert named.notes[-1] == "checkpointed: 1 Layer"
    ledgers = (plain, named, wrapped)
    saved = [
        estimate_ledger(model, TrainSetting(), ledger).saved_activation_bytes for ledger in ledgers
    ]
    assert saved == sorted(saved, reverse=True)
    assert saved[2] < 0.5 * saved[0]
