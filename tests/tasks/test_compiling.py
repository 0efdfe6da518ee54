"""What is compiled as a setting says, and what is told the compiler; nothing is compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._functorch.config
from torch import nn

from planner.training.levers import recompute, repeated_blocks
from planner.training.train import Setting, compiled, set_up_torch


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
    setting = Setting(compile="default", compile_scope="blocks", activation_memory_budget=0.5)
    set_up_torch(setting)
    assert compiled(module, module, setting, None) is module
    assert module._compiled_call_impl is None
    assert all(block._compiled_call_impl is not None for block in module)
    assert torch._functorch.config.activation_memory_budget == 0.5
    assert list(module.state_dict()) == list(stack().state_dict())


def test_some_checkpointed_blocks_are_blocks_among_the_others() -> None:
    """And like ones stay of one class, else each would be another graph."""
    module = stack()
    blocks = repeated_blocks(module)
    for block in blocks[:2]:
        recompute(block)
    assert repeated_blocks(module) == blocks
    assert type(blocks[0]) is type(blocks[1]) is not type(blocks[2])
