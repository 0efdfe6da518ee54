"""A step of a small model on real CPU tensors as a ledger: what ZeRO's events are inserted into."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.core.schema import TrainSetting
from planner.ledger.ledger import Allocated, Event, Freed, Ledger, Marked, Tagged


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return found


class Storages(TorchDispatchMode):
    """Every storage that operations on real tensors make, as events of a ledger."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.numbers: dict[int, int] = {}  # of the living, by the address of the C++ object
        self.references: dict[int, Any] = {}
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            self.note(tensor, str(func))
        return result

    def note(self, tensor: Any, label: str, category: Any = "", weight: Any = None) -> None:
        if not isinstance(tensor, Tensor):
            return
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self.numbers and storage.nbytes():
            self.count += 1
            self.numbers[address] = self.count
            self.references[address] = weakref.ref(storage, partial(self.free, address))
            self.events.append(Allocated(self.count, storage.nbytes(), label))
        if category and address in self.numbers:
            of = 0 if weight is None else self.numbers[weight.untyped_storage()._cdata]
            self.events.append(Tagged(self.numbers[address], category, of))

    def free(self, address: int, _: Any) -> None:
        del self.references[address]
        self.events.append(Freed(self.numbers.pop(address)))


def record_mlp(setting: TrainSetting) -> Ledger:
    """Two steps of AdamW, of all micro-batches where ZeRO-1 adds them up on a rank."""
    storages = Storages()
    model = nn.Sequential(nn.Linear(64, 128), *(Block(128) for _ in range(3)), nn.Linear(128, 24))
    if setting.precision == "pure-bf16":
        model = model.to(torch.bfloat16)
    count = setting.accumulate if setting.parallelism == "zero1" else 1

    def mark(phase: Any, step: int) -> None:
        storages.events.append(Marked(phase, step))

    with storages:
        for parameter in model.parameters():
            storages.note(parameter, "parameter", "parameters")
            parameter.register_post_accumulate_grad_hook(
                lambda p: storages.note(p.grad, "", "gradients", p)
            )
        batch = torch.randn(4, 64).to(next(model.parameters()).dtype)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        mark("build", 0)
        for step in range(2):
            for _ in range(count):
                with torch.autocast("cpu", torch.bfloat16, enabled=setting.precision == "bf16"):
                    output = model(batch)
                loss = output.float().sum() / setting.accumulate
                del output
                mark("forward", step)
                loss.backward()
                del loss
                mark("backward", step)
            optimizer.step()
            mark("optimizer", step)
            optimizer.zero_grad()
            mark("zero_grad", step)
        return Ledger(tuple(storages.events), batch_size=4, num_parameters=0)
