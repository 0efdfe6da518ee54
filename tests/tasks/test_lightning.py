"""A LightningModule is a task by its `training_step`."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.core.errors import PlannerError
from planner.core.schema import FactoryModel, TrainSetting
from planner.ledger.ledger import Ledger
from planner.libraries.torchvision import declare_missing_operators
from planner.training.tasks import from_lightning
from tests.steps import recorded

pytestmark = pytest.mark.trainers
SETTING = TrainSetting(batch_size=2, precision="fp32")


@cache
def module_class() -> Any:
    declare_missing_operators()  # torchmetrics imports torchvision
    lightning = pytest.importorskip("lightning.pytorch")

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

    return Module


def with_loader() -> Any:
    module = module_class()()
    module.train_dataloader = lambda: [[torch.randn(3, 4), torch.randn(3, 1)]]
    return module


def with_batch() -> Any:
    return from_lightning(module_class()(), (torch.randn(5, 4), torch.randn(5, 1)))


def without_batch() -> Any:
    return module_class()()


def manual() -> Any:
    module = with_loader()
    module.automatic_optimization = False
    return module


def record(factory: str) -> Ledger:
    return recorded(FactoryModel(factory=f"{__name__}:{factory}"), SETTING)


def test_its_own_loader_gives_the_batch() -> None:
    ledger, same = (record(name) for name in ("with_loader", "with_batch"))
    assert len(ledger.events) == len(same.events)
    assert ledger.num_parameters == 5


@pytest.mark.parametrize(
    ("name", "said"),
    [("without_batch", "from_lightning"), ("manual", "automatic_optimization is False")],
)
def test_what_is_no_task_is_refused_with_a_way_out(name: str, said: str) -> None:
    with pytest.raises(PlannerError, match=said):
        record(name)
