"""A step compiled block by block, traced: what it keeps beside an eager step and a whole graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from planner.core.errors import UnsupportedError
from planner.core.schema import FactoryModel, TrainSetting
from planner.ledger.ledger import Ledger
from planner.trace.ledger import trace_estimate
from tests.libraries.steps import Changes
from tests.trace.test_compiled import (
    alive_after,
    eager_ledger_of,
    ledger_of,
    peak_of_the_graph,
    setting_for,
    tiny,
)

BLOCKS: Changes = {"compile_scope": "blocks"}


def kept_in(ledger: Ledger) -> int:
    """Bytes alive at the end of the last forward, less those between steps and the loss."""
    loss_bytes = 4
    return sum(alive_after(ledger, "forward")) - sum(alive_after(ledger, "zero_grad")) - loss_bytes


def said_of_graphs(ledger: Ledger) -> int:
    (note,) = [n for n in ledger.notes if "blocks are compiled by themselves" in n]
    return int(note.split("about ")[1].split()[0])


@pytest.mark.compiler
def test_blocks_are_recomputed_one_at_a_time_where_a_whole_model_recomputes_all() -> None:
    """timm's `checkpoint_seq`: of the whole model torch's partition saves no block's input."""
    config = tiny("timm", depths=(4,), num_heads=(3,))
    checkpointed: Changes = {"batch_size": 8, "checkpointing": "blocks"}
    whole = ledger_of(config, setting_for(config, **checkpointed))
    blocks = ledger_of(config, setting_for(config, **checkpointed, **BLOCKS))
    assert peak_of_the_graph(blocks) < 0.5 * peak_of_the_graph(whole)
    eager = eager_ledger_of(config, setting_for(config, **checkpointed))
    assert kept_in(blocks) == kept_in(eager)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = nn.functional.gelu(self.fc(x)).tanh()
        return x + y


class Stacked(nn.Module):
    """Three blocks between which the graph would break."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(192) for _ in range(3)])
        self.head = nn.Linear(192, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = images.flatten(1)
        for block in self.blocks:
            torch._dynamo.graph_break()
            tokens = block(tokens)
        logits: Tensor = self.head(tokens)
        return logits


OWN = FactoryModel(factory="own:build", image_size=(8, 8), num_classes=10)
OWN_SETTING = TrainSetting(
    batch_size=4, precision="fp32", compile="default", compile_scope="blocks"
)


def test_a_module_of_ones_own_that_breaks_between_its_blocks_is_traced() -> None:
    compiled = trace_estimate(OWN, OWN_SETTING, Stacked)
    assert said_of_graphs(compiled) == 2  # images need no gradient, tokens do
    assert kept_in(compiled) < kept_in(
        trace_estimate(OWN, TrainSetting(batch_size=4, precision="fp32"), Stacked)
    )


def test_a_module_without_blocks_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no repeated blocks were found"):
        trace_estimate(OWN, OWN_SETTING, lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 10)))
