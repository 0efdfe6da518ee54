"""What is compiled as a setting says, and what is told the compiler; nothing is compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._functorch.config
from torch import nn

from planner.core.schema import FactoryModel, TrainSetting
from planner.libraries.checkpointing import checkpoint_in_place, repeated_blocks
from planner.training.tasks.compiling import compile_as_set
from planner.training.tasks.making import as_task

OWN = FactoryModel(factory="own:build", image_size=(8, 8), num_classes=10)


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    limit = torch._dynamo.config.recompile_limit
    with torch._functorch.config.patch(activation_memory_budget=1.0):
        yield
    torch._dynamo.config.recompile_limit = limit


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.fc(x)
        return y


def stack(count: int = 3) -> nn.Module:
    return nn.Sequential(*[Block() for _ in range(count)])


def test_blocks_are_compiled_in_place() -> None:
    module = stack()
    setting = TrainSetting(compile="default", compile_scope="blocks", activation_memory_budget=0.5)
    call = compile_as_set(module, as_task(module, OWN, setting), OWN, setting)
    assert call is module
    assert module._compiled_call_impl is None
    assert all(block._compiled_call_impl is not None for block in module)
    assert torch._functorch.config.activation_memory_budget == 0.5
    assert list(module.state_dict()) == list(stack().state_dict())


def test_a_whole_model_is_compiled_beside_itself() -> None:
    module = stack()
    setting = TrainSetting(compile="default")
    call = compile_as_set(module, as_task(module, OWN, setting), OWN, setting)
    assert call._orig_mod is module
    eager = TrainSetting()
    assert compile_as_set(module, as_task(module, OWN, eager), OWN, eager) is None


def test_some_checkpointed_blocks_are_blocks_among_the_others() -> None:
    """And like ones stay of one class, else each would be another graph."""
    module = stack()
    blocks = repeated_blocks(module)
    checkpoint_in_place(blocks[:2])
    assert repeated_blocks(module) == blocks
    assert type(blocks[0]) is type(blocks[1]) is not type(blocks[2])
