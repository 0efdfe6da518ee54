"""A task by example: one real batch is made any size, or it is said why not. And what is compiled
as a setting says; nothing is compiled."""

from collections import UserDict, namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config
from torch import Tensor, nn

from planner.core.errors import UsageError
from planner.training.levers import recompute, repeated_blocks
from planner.training.tasks import from_collator, from_example
from planner.training.tasks.contract import all_tensors
from planner.training.train import Setting, compile_model, set_up_torch

CPU = torch.device("cpu")
Pair = namedtuple("Pair", ["image", "label"])


def resized(example: Any, size: int, batch_size: int | None = None) -> Any:
    module = nn.Linear(1, 1)
    return from_example(module, example, lambda m, b: m(b).sum(), batch_size).batch(size, CPU)


def images(count: int) -> Tensor:
    return torch.arange(count * 3 * 8 * 8, dtype=torch.float32).view(count, 3, 8, 8)


@pytest.mark.parametrize(
    "example",
    [
        (images(2), torch.tensor([0, 1])),
        [images(2), torch.tensor([0, 1])],
        {"x": images(2), "scale": torch.tensor(2.0), "name": "train"},
        Pair(images(2), torch.tensor([0, 1])),
        UserDict(input_ids=torch.zeros(2, 128, dtype=torch.int64)),
    ],
)
def test_tensors_take_the_size_of_their_batch(example: Any) -> None:
    found = resized(example, 5)
    assert type(found) is type(example)
    first = [t for t in all_tensors(found) if t.dim()]
    assert first
    assert all(len(t) == 5 for t in first)


def test_items_come_again_in_order() -> None:
    found = resized((images(2), torch.tensor([7, 8])), 5)
    assert found[1].tolist() == [7, 8, 7, 8, 7]
    assert torch.equal(found[0][2], images(2)[0])


def test_lists_of_samples_go_by_their_length() -> None:
    """As a detector takes them: images of their own sizes, and objects of their own number."""
    example = (
        [torch.rand(3, 8, 8), torch.rand(3, 6, 9)],
        [{"boxes": torch.rand(k, 4), "labels": torch.ones(k)} for k in (1, 5)],
    )
    pictures, targets = resized(example, 3)
    assert [tuple(p.shape) for p in pictures] == [(3, 8, 8), (3, 6, 9), (3, 8, 8)]
    assert [len(t["boxes"]) for t in targets] == [1, 5, 1]
    assert pictures[0].data_ptr() != pictures[2].data_ptr(), "two samples take memory twice"


@pytest.mark.parametrize(
    ("example", "given", "message"),
    [
        ((torch.zeros(4, 3), torch.ones(10)), None, "no single number of items"),
        ([torch.zeros(3, 8, 8)] * 3, None, "holds 3 tensors whose first dimension is 3"),
        ([torch.zeros(3, 8, 8)] * 2, None, "may have 2 or 3 items"),
        ((torch.zeros(4, 3),), 5, "nothing in the example batch has 5 items"),
        ({"text": "a"}, None, "holds no tensor"),
    ],
)
def test_a_number_of_items_that_is_not_clear_is_refused(
    example: Any, given: int | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        resized(example, 2, given)
    assert caught.value.way_out


def test_what_is_no_item_stays_where_the_number_is_given() -> None:
    batch, weights = resized((torch.zeros(4, 3), torch.ones(10)), 6, batch_size=4)
    assert (len(batch), len(weights)) == (6, 10)


def test_a_collator_makes_each_batch_from_the_dataset() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 1)

        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            found = {"logits": self.head(x)}
            return found if labels is None else {**found, "loss": (found["logits"] - labels).sum()}

    def collate(items: list[float]) -> dict[str, Tensor]:
        x = torch.tensor(items)[:, None].expand(-1, 4)
        return {"x": x, "labels": x[:, :1]}

    task = from_collator(Model(), collate, [1.0, 2.0])
    batch = task.batch(3, CPU)
    assert batch["x"][:, 0].tolist() == [1.0, 2.0, 1.0]
    assert task.loss(task.module(), batch).dim() == 0
    with pytest.raises(UsageError, match="without a loss for the batch's fields x"):
        task.loss(task.module(), {"x": batch["x"]})


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
    assert compile_model(module, module, setting, None) is module
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
