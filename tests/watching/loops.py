"""Small trainings to watch, and what they leave in their logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

BATCH, IMAGES, CLASSES = 4, 32, 4


def lines(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    name = "watch.jsonl" if rank == 0 else f"watch.rank{rank}.jsonl"
    return [json.loads(line) for line in (folder / name).read_text().splitlines() if line]


def of_kind(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in lines(folder) if line["kind"] == kind]


def events(folder: Path) -> list[str]:
    return [line["event"] for line in of_kind(folder, "event")]


def end(folder: Path) -> dict[str, Any]:
    return of_kind(folder, "end")[-1]


def data() -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(IMAGES, 3, 8, 8), torch.randint(CLASSES, (IMAGES,)))


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(data(), BATCH, **options)


def tiny() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, CLASSES))


class Loop:
    """The plain script's: a model, its optimizer and a step."""

    def __init__(self) -> None:
        self.model = tiny()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def micro_step(self, images: Tensor, targets: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(self.model(images), targets)
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, images: Tensor, targets: Tensor) -> Tensor:
        loss = self.micro_step(images, targets)
        self.update()
        return loss
