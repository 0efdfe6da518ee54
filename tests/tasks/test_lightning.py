"""A LightningModule is a task by its `training_step`."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from planner.libraries.missing_operators import declare_missing_operators  # noqa: E402

declare_missing_operators()  # torchmetrics imports torchvision
lightning = pytest.importorskip("lightning.pytorch")

from torch import Tensor, nn  # noqa: E402

from planner.core.errors import PlannerError, UnsupportedError  # noqa: E402
from planner.core.schema import FactoryModel, TrainSetting  # noqa: E402
from planner.trace.ledger import trace_estimate  # noqa: E402
from planner.training.tasks import from_lightning  # noqa: E402

MODEL = FactoryModel(factory="tests:none")
SETTING = TrainSetting(batch_size=2, precision="fp32")


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Any:
        x, y = batch
        loss = nn.functional.mse_loss(self.layer(x), y)
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        return {"optimizer": torch.optim.SGD(self.parameters(), lr=0.1)}


class WithLoader(Module):
    def train_dataloader(self) -> Any:
        return [[torch.randn(3, 4), torch.randn(3, 1)]]


def test_its_own_loader_gives_the_batch() -> None:
    ledger = trace_estimate(MODEL, SETTING, WithLoader)
    same = trace_estimate(
        MODEL, SETTING, lambda: from_lightning(Module(), (torch.randn(5, 4), torch.randn(5, 1)))
    )
    assert len(ledger.events) == len(same.events)
    assert ledger.num_parameters == 5


def test_a_module_without_a_batch_is_told_how_to_give_one() -> None:
    with pytest.raises(PlannerError, match="from_lightning"):
        trace_estimate(MODEL, SETTING, Module)


def test_manual_optimization_is_refused() -> None:
    class Manual(WithLoader):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(UnsupportedError, match="automatic_optimization is False"):
        trace_estimate(MODEL, SETTING, Manual)
